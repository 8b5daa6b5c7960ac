"""Reading the file of a tokenizer, and what to say if it is another one."""

from megatron.errors import DataError
from megatron.urls import from_hub, is_hub_name


def read_file(path: str, flag: str = "--tokenizer-model") -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError as error:
        if is_hub_name(path):
            raise DataError(
                f"{path} does not exist: {from_hub(path)} and set {flag} to the tokenizer there."
            ) from error
        raise DataError(f"{path} does not exist: set {flag} to the tokenizer file.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): use another tokenizer file.") from error


def not_a(path: str, kind: str) -> str:
    return f"{path} is not {kind}: check that --tokenizer-model and --tokenizer-type belong together."
