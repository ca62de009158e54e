"""From what a user names (a file, a folder, a hub id) to a GGUF file on this machine."""

from __future__ import annotations

import json
import re
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import ModelNotFoundError

__all__ = ["HUB_OPTIONS", "TOKENIZER_FILE", "is_gguf", "resolve_gguf"]

TOKENIZER_FILE = "tokenizer.gguf"
"""What a saved tokenizer is called: a GGUF that holds a vocabulary and no weights."""

HUB_OPTIONS = ("revision", "cache_dir", "token", "local_files_only", "subfolder", "force_download")
"""Keywords that are huggingface_hub's."""

_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def is_gguf(path: str | PathLike[str]) -> bool:
    """Whether the path is a file that begins as GGUF files do."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def resolve_gguf(name: str | PathLike[str], filename: str | None = None, **hub: Any) -> Path:
    """The GGUF file that ``name`` means.

    Args:
        name: a GGUF file; a folder with one; or a hub id such as ``"org/model-GGUF"``.
        filename: the file inside the folder or the hub's repository.
        hub: keywords of ``huggingface_hub.hf_hub_download`` (``revision``, ``cache_dir``, ``token``,
            ``local_files_only``, ...). A cached file needs no network.

    Raises:
        ModelNotFoundError: there is no such file, or several and none was named.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        return _in_folder(path, filename)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
        raise ModelNotFoundError(path, "name a GGUF file, a folder with one, or a hub id like org/model")
    if filename is None:
        raise ModelNotFoundError(path, f"to take it from the hub, name its file: filename='{path.name}.gguf'")
    return _from_hub(str(name), filename, hub)


def _in_folder(folder: Path, filename: str | None) -> Path:
    if filename is None:
        filename = _saved_name(folder)
    if filename is not None:
        if not (folder / filename).is_file():
            raise ModelNotFoundError(folder / filename)
        return folder / filename
    found = sorted(
        file
        for file in folder.glob("*.gguf")
        if file.name != TOKENIZER_FILE and not _LATER_PART.search(file.name)
    )
    if len(found) == 1:
        return found[0]
    if not found and (folder / TOKENIZER_FILE).is_file():
        return folder / TOKENIZER_FILE
    names = ", ".join(file.name for file in found) or "none"
    raise ModelNotFoundError(folder, f"GGUF files in it: {names}; name one with filename=")


def _saved_name(folder: Path) -> str | None:
    """The file that a config.json written by save_pretrained() names."""
    try:
        name = json.loads((folder / "config.json").read_text())["gguf_file"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Path(name).name if isinstance(name, str) else None


def _from_hub(repository: str, filename: str, hub: dict[str, Any]) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    options = {key: value for key, value in hub.items() if value not in (None, "")}
    try:
        return Path(hf_hub_download(repository, filename, **options))
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise ModelNotFoundError(
            f"{repository}/{filename}", f"it is neither cached nor to be had from the hub ({error})"
        ) from error
