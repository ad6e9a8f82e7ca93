"""Settings of TLS."""

from __future__ import annotations

from typing import Annotated

import msgspec

from plait.setting import Setting


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """TLS."""

    ssl_certfile: Annotated[
        str | None,
        Setting(
            "PEM file with the server's certificate and those between it and its authority; the server then speaks "
            "HTTPS alone. The files of TLS are read again when they change",
            unset="plain HTTP",
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        Setting("PEM file with the certificate's private key, readable by its owner only", unset="--ssl-certfile"),
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        Setting(
            "PEM file with the authorities whose certificates clients must show, by TLS 1.3",
            unset="clients need no certificate",
        ),
    ] = None
