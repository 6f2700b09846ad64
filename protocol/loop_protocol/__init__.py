"""The contract between ``loopd`` and every program that talks to it, as Python types.

Depends on msgspec only, so that a client starts fast. ``loop_protocol.v1`` holds the records of protocol version 1,
``client`` a blocking client, ``trio_client`` one for trio programs (extra ``client``).
"""

PROTOCOL_VERSIONS = (1,)
