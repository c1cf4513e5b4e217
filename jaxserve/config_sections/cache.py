"""The section of the configuration for the KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from jaxserve.config_sections.value_types import Auto, Bytes, DirPath, Float, Int, Section


class CacheSection(Section):
    """The paged KV cache."""

    page_size: Annotated[Int, Field(ge=1, le=4096)] | Auto = Field(
        "auto", description="Tokens per page. auto: 16 on CPU and GPU, 128 on TPU."
    )
    num_pages: Annotated[Int, Field(ge=1, lt=2**31)] | Auto = Field(
        "auto", description="Number of pages. auto: as many as memory_fraction allows."
    )
    num_window_pages: Annotated[Int, Field(ge=1, lt=2**31)] | Auto = Field(
        "auto",
        description="Number of pages of the sliding-window layers, which only store the window. auto: enough for "
        "max_num_seqs requests, or half of num_pages.",
    )
    memory_fraction: Float = Field(
        0.9,
        ge=0.01,
        le=1,
        description="Share of XLA's memory that weights, KV cache and activations may use.",
    )
    prefix_cache: bool = Field(True, description="Reuse the KV pages of equal prompt prefixes.")
    host_memory: Bytes | None = Field(
        None,
        description="Memory of the host for pages that are evicted from the prefix cache, e.g. 8GiB. They are loaded "
        "again instead of computed. null: none.",
    )
    disk: DirPath | None = Field(
        None,
        description="Directory of a file for these pages, so that they survive a restart. The file has the size of "
        "cache.host_memory, and only its pages in use need memory. null: no file.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"] = Field(
        "auto",
        description="Data type of keys and values. auto: that of the activations. int8 and fp8 (E4M3) have a float32 "
        "scale for each token and head.",
    )

    @field_validator("host_memory")
    @classmethod
    def _of_prefixes(cls, host_memory: int | None, info: ValidationInfo) -> int | None:
        if host_memory is not None and not info.data.get("prefix_cache", True):
            raise ValueError("it needs cache.prefix_cache")
        return host_memory

    @field_validator("disk")
    @classmethod
    def _of_host_pages(cls, disk: Path | None, info: ValidationInfo) -> Path | None:
        if disk is not None and info.data.get("host_memory", 1) is None:
            raise ValueError("it needs cache.host_memory")
        return disk
