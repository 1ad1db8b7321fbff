"""ms-swift: ``--external_plugins FILE --callbacks hf_cce``, where FILE is the path of this file.

    python -c "import hf_cce.integrations.ms_swift as plugin; print(plugin.__file__)"    # needs ms-swift installed

ms-swift runs the file and looks up the callback by name; read and tested with ms-swift 4.6.0. To change options, copy the last
line into your own file, with ``functools.partial(SwiftCCECallback, gradient_filter=None)``.
"""

from __future__ import annotations

from typing import Any

from swift.callbacks.mapping import callbacks_map

from hf_cce import CCECallback


class SwiftCCECallback(CCECallback):
    """``CCECallback`` with the arguments that ms-swift passes, of which only the options are used."""

    def __init__(self, args: Any, trainer: Any, **options: Any) -> None:
        super().__init__(**options)


callbacks_map["hf_cce"] = SwiftCCECallback
