"""What a setting does in a package's source: read with `ast`, never imported.

`study(open_package("sglang"), "--pp-async-batch-depth")` gives every place where the setting is defined, defaulted,
derived, validated and used, through renames, and a summary in sentences.
"""

from __future__ import annotations

from fullbore.explain.source.package import Package, SourceError, open_package
from fullbore.explain.source.places import Certainty, Derived, Mention, Place
from fullbore.explain.source.study import Study, study

__all__ = ["Certainty", "Derived", "Mention", "Package", "Place", "SourceError", "Study", "open_package", "study"]
