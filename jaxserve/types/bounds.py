"""Number types whose bounds msgspec checks when it decodes a message. The device's arrays have the same bounds."""

from __future__ import annotations

from typing import Annotated

import msgspec

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
TopCount = Annotated[int, msgspec.Meta(ge=0, le=20)]  # a step reports at most 20 likeliest tokens
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Real = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]  # refuses NaN and infinity too
