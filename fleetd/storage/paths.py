"""The home folder: where it is, who may read it, and that one daemon owns it.

Everything a daemon keeps lies in one folder of mode 0700. A lock file, held for the life of the process,
makes a second daemon on the same home impossible; because the lock is the judge, a socket file left behind by
a killed daemon can be replaced, but only after a connection to it has failed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from fleetd import limits
from fleetd.errors import AlreadyRunning, ConfigError, DiskFull, Forbidden, SocketPathTooLong
from fleetd.storage import durable
from fleetd.storage.durable import PRIVATE_DIR, PRIVATE_FILE

# A token is a guess-proof secret, not a password: 32 random bytes are out of reach of any search.
TOKEN_BYTES = 32
TOKEN_PREFIX = "fleet-"  # noqa: S105  (what makes a leaked token recognisable to a scanner)
# Of one that a person chose: 128 bits in base64.
TOKEN_LEAST_CHARS = 22
_NEW_TOKEN = "Delete it; a new token is made at the next start."  # noqa: S105


class HomeFolder(msgspec.Struct, frozen=True):
    """The names inside one home folder."""

    root: Path

    @property
    def socket(self) -> Path:
        return self.root / "fleetd.sock"

    @property
    def token(self) -> Path:
        return self.root / "api-token"

    @property
    def config(self) -> Path:
        return self.root / "fleetd.toml"

    @property
    def db(self) -> Path:
        return self.root / "fleetd.db"

    @property
    def pinned_models(self) -> Path:
        """Names of models that stay loaded."""
        return self.root / "pinned-models.json"

    @property
    def log(self) -> Path:
        """Where launchd puts the daemon's output; other systems keep it elsewhere."""
        return self.root / "fleetd.log"

    @property
    def lock(self) -> Path:
        return self.root / "fleetd.lock"

    @property
    def identity(self) -> Path:
        return self.root / "identity"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def kv_blocks(self) -> Path:
        """Sealed keys and values of prompts."""
        return self.cache / "kv"

    @property
    def kv_key(self) -> Path:
        """What they are sealed with; without it they cannot be read."""
        return self.identity / "kv.key"


def resolve(flag: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ) -> HomeFolder:
    """The home folder asked for: --home, else FLEETD_HOME, else systemd's state folder, else the user's."""
    # systemd lists several state directories separated by colons; the unit declares one.
    systemd = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    chosen = flag or environ.get("FLEETD_HOME") or systemd or _user_state()
    return HomeFolder(Path(chosen).expanduser().absolute())


def _user_state() -> str:
    # Imported late: who says where the home is pays nothing for the rules of each platform.
    import platformdirs

    return platformdirs.user_state_dir("fleetd", False)


def prepare(home: HomeFolder) -> None:
    """Create the home, or make an existing one private.

    Raises:
        SocketPathTooLong: no socket could be bound there.
        ConfigError: it is not a folder, or not this user's.
        DiskFull: no room for even a folder.
    """
    check_socket_path(home.socket)
    try:
        home.root.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
        found = home.root.stat()
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"The home folder {home.root} belongs to user id {found.st_uid}, not {os.geteuid()}.",
                hint="Choose another folder with --home, or start fleetd as that user.",
            )
        if stat.S_IMODE(found.st_mode) != PRIVATE_DIR:
            home.root.chmod(PRIVATE_DIR)
        home.cache.mkdir(mode=PRIVATE_DIR, exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(
            f"The home {home.root} is not a folder.", hint="Choose another folder with --home."
        ) from error
    except OSError as error:
        raise unusable(home, error) from error


def unusable(home: HomeFolder, error: OSError) -> ConfigError | DiskFull:
    """The error of a home in which something could not be made."""
    reason = (error.strerror or str(error)).lower()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"The home folder {home.root} cannot be written: {reason}.", hint="Free some space.")
    return ConfigError(
        f"The home folder {home.root} cannot be used: {reason}.", hint="Choose another folder with --home."
    )


def check_socket_path(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > limits.SOCKET_PATH_BYTES:
        raise SocketPathTooLong(
            f"The socket path {path} has {length} bytes; Unix sockets allow {limits.SOCKET_PATH_BYTES}.",
            hint="Choose a shorter home folder with --home or FLEETD_HOME.",
        )


class HomeLock:
    """Exclusive ownership of a home, for the life of the process; the kernel releases it on any death."""

    def __init__(self, home: HomeFolder) -> None:
        self._home = home
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock and write our pid into it.

        Raises:
            AlreadyRunning: another process has it; the error names its pid.
            ConfigError, DiskFull: the file cannot be made, or its file system has no locks.
        """
        try:
            # Never through a planted link: the file is truncated below.
            fd = os.open(self._home.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE_FILE)
        except OSError as error:
            raise unusable(self._home, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise AlreadyRunning(
                f"A fleetd is already running on {self._home.root} (pid {holder}).",
                hint=f"Use it with fleetctl, stop it with `kill {holder}`, or choose another --home.",
            ) from None
        except OSError as error:
            # A disk of the network may have none, and two daemons on one home would break it.
            os.close(fd)
            raise unusable(self._home, error) from error
        os.ftruncate(fd, 0)
        # The pid is for people; the lock itself does not depend on it, so a full disk does not matter here.
        try:
            os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
        except OSError:
            pass
        self._fd = fd

    def release(self) -> None:
        """Give the lock up. The file stays: removing it would let two daemons lock two different files."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> HomeLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def clear_stale_socket(path: Path, *, timeout_s: float = 1.0) -> bool:
    """Remove a socket that no process serves; True if there was one.

    Raises:
        AlreadyRunning: something answers.
        ConfigError: something that is not a socket lies there; it is not ours to remove.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{path} is in the way: it is not a socket.", hint="Move it elsewhere.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout_s)
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return True
    raise AlreadyRunning(f"Another process answers on {path}.", hint="Stop it, or choose another --home.")


def load_token(path: Path) -> str:
    """The API token: created once, readable by this user only.

    Raises:
        Forbidden: the file is a link or another user's, so another user could have chosen the token; or other
            users may have read it.
        ConfigError: the file is unreadable, or holds a token that can be guessed.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _create_token(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Forbidden(
                f"The token file {path} is a symbolic link.",
                hint=_NEW_TOKEN,
            ) from error
        raise ConfigError(f"The token file {path} cannot be read: {error.strerror}.") from error
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise Forbidden(
                f"The token file {path} belongs to user id {found.st_uid}, not to you.",
                hint=_NEW_TOKEN,
            )
        if stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
            raise Forbidden(
                f"Other users may have read the token file {path} (mode {stat.S_IMODE(found.st_mode):03o}).",
                hint=f"{_NEW_TOKEN} If no one else has read it, keep it: chmod 600 {path}",
            )
        token = file.read(4096).decode("ascii", "replace").strip()
    if len(token) < TOKEN_LEAST_CHARS:
        raise ConfigError(
            f"The token file {path} holds {len(token)} characters; a token has {TOKEN_LEAST_CHARS} at least.",
            hint=_NEW_TOKEN,
        )
    return token


def _create_token(path: Path) -> str:
    token = TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    # False: another process was first, and its token stays the token.
    return token if durable.create(path, f"{token}\n".encode("ascii")) else load_token(path)
