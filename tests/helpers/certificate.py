"""Self-signed certificates of tests, good until 2120: nothing outside the tests trusts them."""

from __future__ import annotations

from pathlib import Path

from cluster.config import TlsConfig

CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBVDCB+6ADAgECAhQup6pYX1MxKoyf1SmOB/JHa7cKOjAKBggqhkjOPQQDAjAU
MRIwEAYDVQQDDAltZXNoLnRlc3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEw
MDAwMDBaMBQxEjAQBgNVBAMMCW1lc2gudGVzdDBZMBMGByqGSM49AgEGCCqGSM49
AwEHA0IABN8RLpmJQ+Tssqi+vqL2ndLG4Od0ulokDKyi0A645O07/HETEx59KLiK
oy6gKo+9D+IRI6G/jwfElZWdEzh3MAejKTAnMBQGA1UdEQQNMAuCCW1lc2gudGVz
dDAPBgNVHRMBAf8EBTADAQH/MAoGCCqGSM49BAMCA0gAMEUCID9jKu7bVKOMqU0v
F6STQouwUh78jvlOL5rrZHMn4wb0AiEA/b7IIaIyeSfv6w/vtRx9d7nhYBCy9tG1
RfXysW1A5qE=
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgAMHTWde/h20FrPvT
NcFMtRENxWkiMyU6NfZlZyXZv/ehRANCAATfES6ZiUPk7LKovr6i9p3SxuDndLpa
JAysotAOuOTtO/xxExMefSi4iqMuoCqPvQ/iESOhv48HxJWVnRM4dzAH
-----END PRIVATE KEY-----
"""
OTHER_CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBVjCB/qADAgECAhRCk6itCpGiAxIRn+ejbetAqYGvZTAKBggqhkjOPQQDAjAV
MRMwEQYDVQQDDApvdGhlci50ZXN0MCAXDTIwMDEwMTAwMDAwMFoYDzIxMjAwMTAx
MDAwMDAwWjAVMRMwEQYDVQQDDApvdGhlci50ZXN0MFkwEwYHKoZIzj0CAQYIKoZI
zj0DAQcDQgAEVmeWH7how6ZE6lzkzOlM4Q5QL8ddsQxxG3YIOREtfN/9Bv7Vl0Ja
my26kM6tfs2sCHbD7SbQ5zMeq255ZPVALaMqMCgwFQYDVR0RBA4wDIIKb3RoZXIu
dGVzdDAPBgNVHRMBAf8EBTADAQH/MAoGCCqGSM49BAMCA0cAMEQCIBIbndr24HP9
PENeumeXkMS6RZgKwjKr7lsveUwLzEaPAiAsWylBmgBhp0kF1zTNjkKW7O8asJGv
iY1g/WeTfxfrVA==
-----END CERTIFICATE-----
"""
OTHER_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgpq+3JmFmbh97ly4t
nSr3zE1eUOeFOoTJHz1QwzJAbz6hRANCAARWZ5YfuGjDpkTqXOTM6UzhDlAvx12x
DHEbdgg5ES183/0G/tWXQlqbLbqQzq1+zawIdsPtJtDnMx6rbnlk9UAt
-----END PRIVATE KEY-----
"""
KEY_WITH_PASS_PHRASE = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIH0MF8GCSqGSIb3DQEFDTBSMDEGCSqGSIb3DQEFDDAkBBBd+8PbGKe+swSxk7gE
W9uKAgIIADAMBggqhkiG9w0CCQUAMB0GCWCGSAFlAwQBKgQQ3W3XJvUhlZB+0YPi
1mERRwSBkAHZxmAW3OiEGeF24p/7d9XVAxmHOjF7E00z4rPbbYBZxTEBgbwLn/6d
OtOlG933DGxBBGKFJyWMHcx9PA1Tl1h+JS2LcIKQsHglKmjdQmHXKRTZ6yYPydVk
sE3yiPssmYo6Bcx7uFgpSAp7sD+7IVXYq+/dAftnz8HSRzhNWhC2Cd+iBCivf3lP
guuMH8QmGA==
-----END ENCRYPTED PRIVATE KEY-----
"""


def write_certificate(folder: Path, certificate: str = CERTIFICATE, key: str = KEY) -> TlsConfig:
    """Write a certificate for ``mesh.test`` and its key to a folder."""
    found = TlsConfig(certificate_file=folder / "certificate.pem", key_file=folder / "key.pem")
    found.certificate_file.write_text(certificate, encoding="utf-8")
    found.key_file.write_text(key, encoding="utf-8")
    return found
