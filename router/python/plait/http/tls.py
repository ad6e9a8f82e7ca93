"""TLS of the front door: its files are checked, and read again when they change.

A connection keeps the certificate that it began with. The listening context takes each new connection over to the
context that was read last.
"""

from __future__ import annotations

import ssl
import stat
from pathlib import Path
from typing import NoReturn

from plait.errors import SettingsError
from plait.http.live_files import LiveFiles
from plait.secret_file import read_secret_file
from plait.tls_settings import TlsSettings

MAX_PEM_BYTES = 1 << 20
_END_CERTIFICATE = "-----END CERTIFICATE-----"
_NOT_YET_VALID, _EXPIRED = 9, 10
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


class TlsFiles(LiveFiles[ssl.SSLContext]):
    """Certificate, key and clients' authorities. New files that cannot be used are refused, and those before stay."""

    def __init__(self, certfile: Path, keyfile: Path, ca_certs: Path | None) -> None:
        """Read them; raises `SettingsError` if they cannot be used."""
        self._certfile, self._keyfile, self._ca_certs = certfile, keyfile, ca_certs
        super().__init__("TLS", [certfile, keyfile] if ca_certs is None else [certfile, keyfile, ca_certs])

    def read(self) -> ssl.SSLContext:
        chain = _read_pem("--ssl-certfile", self._certfile)
        context = _server_context(self._certfile, self._keyfile)
        _check_dates(self._certfile, chain, context)
        if self._ca_certs is not None:
            _require_clients(context, self._ca_certs)
        return context

    def shown(self) -> str:
        return f"the certificate of {self._certfile}"

    def shown_kept(self) -> str:
        return "the files that were"

    def listening(self) -> ssl.SSLContext:
        """A context whose new connections take what was read last."""
        context = self.read()
        context.sni_callback = self._take_over
        return context

    def _take_over(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """OpenSSL calls it at a client's first message, whether that names a server or not."""
        connection.context = self.value


def tls_files(settings: TlsSettings) -> TlsFiles | None:
    """The files that the settings name; None for plain HTTP. Raises `SettingsError` if they cannot be used."""
    certfile, keyfile, ca_certs = settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs
    if certfile is None:
        for name, given in (("--ssl-keyfile", keyfile), ("--ssl-ca-certs", ca_certs)):
            if given is not None:
                raise SettingsError(f"{name} is given without --ssl-certfile; give the server's certificate too")
        return None
    return TlsFiles(Path(certfile), Path(keyfile or certfile), Path(ca_certs) if ca_certs is not None else None)


def _read_pem(setting: str, path: Path) -> str:
    text = read_secret_file(setting, path, MAX_PEM_BYTES, closed_to=0).decode("ascii", errors="replace")
    if _END_CERTIFICATE not in text:
        raise SettingsError(f"{setting} {path} holds no certificate; give a PEM file that has one")
    return text


def _server_context(certfile: Path, keyfile: Path) -> ssl.SSLContext:
    key = read_secret_file("--ssl-keyfile", keyfile, MAX_PEM_BYTES, closed_to=stat.S_IROTH)
    if b"PRIVATE KEY-----" not in key:
        raise SettingsError(f"--ssl-keyfile {keyfile} holds no private key; give the PEM file that has it")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certfile, keyfile, password=lambda: _reject_password(keyfile))
    except ssl.SSLError as error:
        raise SettingsError(_why_not(certfile, keyfile, error)) from error
    return context


def _reject_password(keyfile: Path) -> NoReturn:
    raise SettingsError(
        f"--ssl-keyfile {keyfile} is encrypted, and there is nobody to ask for its password; write it without one, say "
        "by `openssl pkey -in OLD -out NEW`, readable by its owner only"
    )


def _why_not(certfile: Path, keyfile: Path, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return (
            f"--ssl-keyfile {keyfile} is not the key of the first certificate in --ssl-certfile {certfile}; give the "
            "key that the certificate was made with, and put the server's own certificate first"
        )
    return (
        f"--ssl-certfile {certfile} with --ssl-keyfile {keyfile} cannot be used ({error.reason or error}); give PEM "
        "files that `openssl x509 -in CERTFILE` and `openssl pkey -in KEYFILE` read"
    )


def _check_dates(certfile: Path, chain: str, server: ssl.SSLContext) -> None:
    """Raise `SettingsError` for a certificate that clients would refuse whomever they trust: a client's handshake."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=chain[: chain.index(_END_CERTIFICATE)] + _END_CERTIFICATE + "\n")
    try:
        _shake_hands(client, server)
    except ssl.SSLCertVerificationError as error:
        problem = {_EXPIRED: "has expired", _NOT_YET_VALID: "is not valid yet"}.get(
            error.verify_code, f"is one that clients refuse ({error.verify_message})"
        )
        raise SettingsError(
            f"--ssl-certfile {certfile} {problem}; renew it, or check this machine's clock (`date`)"
        ) from error
    except ssl.SSLError as error:
        raise SettingsError(f"--ssl-certfile {certfile} cannot be used ({error.reason}); give another one") from error


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """A handshake in memory, in one process."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while sides:
        sides = [side for side in sides if not _is_through(side)]


def _is_through(side: ssl.SSLObject) -> bool:
    """Whether its handshake is complete."""
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _require_clients(context: ssl.SSLContext, ca_certs: Path) -> None:
    """Take connections of those clients alone whose certificate an authority in `ca_certs` has signed."""
    authorities = _read_pem("--ssl-ca-certs", ca_certs)
    try:
        context.load_verify_locations(cadata=authorities)
    except ssl.SSLError as error:
        raise SettingsError(
            f"--ssl-ca-certs {ca_certs} cannot be read ({error.reason or error}); give PEM certificates"
        ) from error
    if not context.get_ca_certs():
        raise SettingsError(f"--ssl-ca-certs {ca_certs} holds no authority's certificate (CA:TRUE); give one that is")
    context.verify_mode = ssl.CERT_REQUIRED
    # A session that goes on shows no certificate again: a client would outlive its authority here.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
