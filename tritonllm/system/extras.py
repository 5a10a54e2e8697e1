"""How to install an extra of this package, for errors: the name on the package index is another project's."""


def install(*extras: str, options: str = "") -> str:
    """The command that brings these extras (``serve``, ``ray``, ...), with pip's ``options``, and where to run it."""
    return f"pip install {options and options + ' '}'.[{','.join(extras)}]' in a checkout of tritonllm's repository"
