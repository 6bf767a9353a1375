"""Who may reach a mesh: checked before anything of it starts, and carried out at its front door."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from cluster.config import HttpConfig, MeshConfig, TlsConfig
from shared.errors import ConfigError
from shared.settings import Settings


def secured(config: MeshConfig, settings: Settings) -> MeshConfig:
    """Return the configuration with the files of its front door resolved, all of them good.

    Args:
        config: The mesh.
        settings: Name the file of tokens where the configuration does not.

    Raises:
        ConfigError: others could reach it without a token, or a file of tokens, certificate or key cannot be used.
    """
    http = config.http
    tokens_file = http.tokens_file or settings.tokens_file
    if tokens_file is None and not http.is_loopback:
        raise ConfigError(
            f"http.host {http.host} is reached from other machines: name a file of bearer tokens in http.tokens_file "
            "or RANKMESH_TOKENS_FILE, or listen on 127.0.0.1",
            field="http.tokens_file", value=http.host,
        )  # fmt: skip
    if tokens_file is not None:
        from services.ingress.auth import read_tokens  # most meshes have none, and the command line starts sooner

        tokens_file = tokens_file.absolute()
        read_tokens(tokens_file)
    tls = http.tls and _usable(http.tls)
    return config.model_copy(update={"http": http.model_copy(update={"tokens_file": tokens_file, "tls": tls})})


def check_wide(http: HttpConfig) -> None:
    """Refuse to serve others without tokens, whoever made the configuration.

    Raises:
        ConfigError: it names an address that others reach, and no tokens.
    """
    if http.tokens_file is None and not http.is_loopback:
        raise ConfigError(f"http.host {http.host} needs http.tokens_file", field="http.tokens_file", value=http.host)


def pem_bundle(tls: TlsConfig, folder: Path) -> Path:
    """Write certificate and key as the one file that HAProxy reads, for this user alone; return its path."""
    path = folder / "front.pem"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as bundle:
        for part in (tls.certificate_file, tls.key_file):
            bundle.write(part.read_bytes().rstrip() + b"\n")
    return path


def _usable(tls: TlsConfig) -> TlsConfig:
    found = TlsConfig(certificate_file=tls.certificate_file.absolute(), key_file=tls.key_file.absolute())
    for field, path in (("certificate_file", found.certificate_file), ("key_file", found.key_file)):
        if not path.is_file():
            raise ConfigError(f"http.tls.{field}: there is no file {path}", field=f"http.tls.{field}", value=str(path))
    try:
        # Refused, not asked for: nobody is there to type a pass phrase.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            found.certificate_file, found.key_file, password=_no_pass_phrase
        )
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(
            f"http.tls: {found.certificate_file} and {found.key_file} are no certificate and its key: {error}",
            field="http.tls", value=str(found.certificate_file),
        ) from error  # fmt: skip
    return found


def _no_pass_phrase() -> str:
    raise ValueError("the key asks for a pass phrase")
