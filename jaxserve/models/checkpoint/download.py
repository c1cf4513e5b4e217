"""Downloads from the hub: data files only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import DATA_FILES, read_object
from jaxserve.models.unserved import refuse_unserved

# Second copies of the weights in the authors' own format, and exports for other frameworks.
SKIPPED_FILES = ("original/*", "consolidated*", "onnx/*", "openvino/*", "metal/*")
_HUB_DOWN = "check the network, or name a local directory; a model downloaded before is found with HF_HUB_OFFLINE=1"
# The files that say what a model is
CONFIG_FILES = ("config.json", "generation_config.json", "*quant_config.json", "quantize_config.json", "modules.json")


def download(repo_id: str, revision: str | None, cache_dir: Path | None) -> Path:
    """Download a model of the hub unless it is cached. Returns its directory. Raises ModelLoadError, as hub.resolve.

    A model of a family that is not served is refused before its weights are downloaded.
    """
    download_config(repo_id, revision, cache_dir)
    return _snapshot(repo_id, revision, cache_dir, DATA_FILES)


def download_config(repo_id: str, revision: str | None = None, cache_dir: Path | None = None) -> Path:
    """Download only the files that say what a model is. Returns its directory. Raises ModelLoadError, as `download`."""
    directory = _snapshot(repo_id, revision, cache_dir, CONFIG_FILES)
    if (directory / "config.json").is_file():
        refuse_unserved(read_object(directory / "config.json"))
    return directory


def _snapshot(repo_id: str, revision: str | None, cache_dir: Path | None, files: Iterable[str]) -> Path:
    wanted = f"{repo_id} at revision {revision}" if revision else repo_id
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=list(files),
                ignore_patterns=list(SKIPPED_FILES),
            )
        )
    except GatedRepoError as error:
        raise ModelLoadError(f"{wanted} is gated", fix="accept its terms on the hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{repo_id} has no revision {revision!r}", fix="check model.revision") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelLoadError(
            f"{wanted} is neither a directory here nor a model on the hub",
            fix="check the spelling; a private model needs HF_TOKEN",
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(f"the hub is not reachable and {wanted} is not cached", fix=_HUB_DOWN) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelLoadError(f"{wanted} could not be downloaded: {_one_line(error)}", fix=_HUB_DOWN) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
