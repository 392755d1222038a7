"""Names on the hub: one question before a library asks again and again."""

from __future__ import annotations

import os

from packing.errors import InputError, one_line

HUB_TIMEOUT = 10.0
"""Seconds that the hub has to answer the first question."""


def looks_like_path(name: str) -> bool:
    """Whether a name can't be meant for the hub, where it is NAME or OWNER/NAME."""
    parent = os.path.dirname(name)
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or (bool(parent) and os.path.isdir(parent))


def local_only(
    name: str, *files: str, called: str = "", kind: str = "file or directory", revision: str | None = None
) -> bool:
    """Whether to load a name without the hub: it is a path, or the hub is out of reach and the cache has it.

    transformers asks an unreachable hub again and again, half a minute for a slip of the pen.

    Args:
        name: A path, or a name on the hub.
        files: The cache has it if it has one of these.
        called: What errors say before the name, such as "the tokenizer ".
        kind: What a path should lead to.
        revision: A commit, branch or tag of the hub's repository.

    Raises:
        InputError: a path to nothing, or a name that no cache holds while the hub can't be reached.
    """
    if os.path.exists(name):
        return True
    nothing = f"{called}{name}: no such {kind}"
    if looks_like_path(name):
        raise InputError(nothing)
    import huggingface_hub
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # of httpx or httpx2, whichever this hub library uses
        OfflineModeIsEnabled,
    )

    try:
        huggingface_hub.model_info(name, revision=revision, timeout=HUB_TIMEOUT)
    except HFValidationError as error:
        raise InputError(f"{nothing}, and no name that the hub can have") from error
    except (HfHubHTTPError, ValueError, TypeError, LookupError):
        pass  # it answers, or a mirror of its files does: what it has to say, the loading says
    except (HTTPError, OfflineModeIsEnabled) as error:
        found = (huggingface_hub.try_to_load_from_cache(name, file, revision=revision) for file in files)
        if not any(isinstance(file, str) for file in found):
            raise InputError(f"{nothing}, and the hub can't be reached ({one_line(error)})") from error
        return True
    return False
