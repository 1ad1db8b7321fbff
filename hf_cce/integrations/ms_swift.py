"""ms-swift: ``--external_plugins FILE --callbacks hf_cce``, where FILE is the path of this file.

    python -c "import hf_cce.integrations.ms_swift as plugin; print(plugin.__file__)"    # needs ms-swift installed

ms-swift runs the file and looks the callback up by its name; read and tested with ms-swift 4.6.0. For options other than the
defaults copy the last line into a file of your own, with ``functools.partial(SwiftCCECallback, gradient_filter=None)``.
"""

from __future__ import annotations

from typing import Any

from swift.callbacks.mapping import callbacks_map

from hf_cce import CCECallback


class SwiftCCECallback(CCECallback):
    """``CCECallback`` with the arguments that ms-swift gives its callbacks.

    Args:
        args: ms-swift's training arguments. ``trainer``: the trainer that is being built. Neither is used: what the callback
            needs comes with each event.
        options: those of ``CCECallback``.
    """

    def __init__(self, args: Any, trainer: Any, **options: Any) -> None:
        super().__init__(**options)


callbacks_map["hf_cce"] = SwiftCCECallback
