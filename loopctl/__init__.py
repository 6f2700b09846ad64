"""The command line: talks to the daemon over its socket, and starts one where a command needs it.

It imports neither trio nor the daemon, and a command's module only when that command runs, so that it starts fast.
"""
