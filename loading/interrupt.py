"""Importing this lets Ctrl-C end a script without a traceback, while the script imports torch.

The one module that acts when it is imported: `command_line.run_script` takes Ctrl-C over.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where Ctrl-C is ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)
