"""Attacks of one user on the processes, files and listeners of another user.

    attacker.py processes < {"pids": […]}                       tries all operations on each process
    attacker.py enumerate < {"paths": […]}                      lists all sockets of the host, and all files below each path
    attacker.py files     < {"paths": […]}                      tries to read, write and connect to each path
    attacker.py secrets   < {"paths": […], "secrets": {…}}      searches all readable files below each path for these values
    attacker.py garbage HOST PORT                               sends invalid bytes
    attacker.py flood HOST PORT COUNT                           opens connections and holds them until its input ends

Prints a line for each success: the operation, a space, and its object. The owner runs the same program, to prove that each
operation can succeed.
"""

import errno
import ctypes, ipaddress, json, os, resource, signal, socket, stat, struct, sys

libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PTRACE_DETACH = 16, 17
PIDFD_OPEN, PIDFD_GETFD = 434, 438


def attempt(operation, target, action):
    try:
        result = action()
    except (OSError, ValueError, PermissionError):
        return None
    print(operation, target, flush=True)
    return result


def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def readable(path, flags=os.O_RDONLY):
    os.close(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC))


def read_byte(path):
    """Any user can open the files of an exited process, but they are empty."""
    with open(path, "rb") as file:
        if not file.read(1):
            raise OSError("empty")


def trace(pid):
    check(libc.ptrace(PTRACE_ATTACH, pid, None, None))
    os.waitpid(pid, 0x40000000)  # __WALL
    libc.ptrace(PTRACE_DETACH, pid, None, None)


def read_memory(pid):
    with open(f"/proc/{pid}/maps") as maps:
        first = next((line for line in maps if " r" in line), "")
    start = int(first.split("-")[0], 16)
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        memory.seek(start)
        memory.read(16)


def copy_memory(pid):
    buffer = ctypes.create_string_buffer(8)
    local = struct.pack("QQ", ctypes.addressof(buffer), 8)
    # An invalid address is enough: the kernel checks permissions first.
    remote = struct.pack("QQ", 4096, 8)
    result = libc.process_vm_readv(pid, local, 1, remote, 1, 0)
    if result < 0 and ctypes.get_errno() != 14:  # EFAULT: permitted, but the address is invalid
        check(result)


def take_descriptor(pid):
    pidfd = check(libc.syscall(PIDFD_OPEN, pid, 0))
    try:
        os.close(check(libc.syscall(PIDFD_GETFD, pidfd, 0, 0)))
    finally:
        os.close(pidfd)


def same_score(pid):
    with open(f"/proc/{pid}/oom_score_adj") as file:
        score = file.read()
    with open(f"/proc/{pid}/oom_score_adj", "w") as file:
        file.write(score)


def limits(pid):
    # Reading limits needs the same permission as changing them.
    resource.prlimit(pid, resource.RLIMIT_CORE)


def processes(targets):
    for pid in targets["pids"]:
        proc = f"/proc/{pid}"
        for name in ["environ", "maps", "auxv", "io"]:
            attempt(name, pid, lambda: read_byte(f"{proc}/{name}"))
        attempt("ns/net", pid, lambda: readable(f"{proc}/ns/net"))
        for name in ["fd", "root", "cwd", "map_files"]:
            attempt(name, pid, lambda: os.listdir(f"{proc}/{name}/"))
        for name in ["exe", "cwd"]:
            attempt("link", pid, lambda: os.readlink(f"{proc}/{name}"))
        attempt("memory", pid, lambda: read_memory(pid))
        attempt("memory-copy", pid, lambda: copy_memory(pid))
        attempt("descriptor", pid, lambda: take_descriptor(pid))
        attempt("score", pid, lambda: same_score(pid))
        attempt("limits", pid, lambda: limits(pid))
        attempt("priority", pid, lambda: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid)))
        attempt("processors", pid, lambda: os.sched_setaffinity(pid, os.sched_getaffinity(pid)))
        attempt("signal", pid, lambda: os.kill(pid, signal.SIGCONT))
        attempt("trace", pid, lambda: trace(pid))


def address(text):
    """Parses the kernel's format: hexadecimal 32-bit words in the machine's byte order."""
    digits, port = text.split(":")
    parts = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return f"{ipaddress.ip_address(b''.join(parts))} {int(port, 16)}"


def enumerate_(targets):
    """Prints `tcp` or `udp` with address, port and owner of each listener, `unix` with a name, `file` with a path."""
    for protocol, states in [("tcp", ["0A"]), ("udp", ["07"])]:
        for name in [protocol, protocol + "6"]:
            with open(f"/proc/net/{name}") as table:
                for fields in map(str.split, list(table)[1:]):
                    if fields[3] in states:
                        print(protocol, address(fields[1]), fields[7])
    with open("/proc/net/unix") as table:
        for line in list(table)[1:]:
            fields = line.rstrip("\n").split(None, 7)
            # Listening stream sockets, and all datagram sockets.
            if len(fields) == 8 and (int(fields[3], 16) & 0x10000 or fields[4] == "0002"):
                print("unix", fields[7])
    for path in targets["paths"]:
        for parent, directories, names in os.walk(path):
            for name in directories + names:
                print("file", os.path.join(parent, name))


def connect(path):
    address = "\0" + path[1:] if path.startswith("@") else path
    # Try each type: with a wrong one, connect(2) fails before the kernel checks permissions.
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as client:
            client.settimeout(5)
            try:
                return client.connect(address)
            except OSError as error:
                if error.errno != errno.EPROTOTYPE:
                    raise


def files(targets):
    for path in targets["paths"]:
        if path.startswith("@"):
            attempt("connect", path, lambda: connect(path))
            continue
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            continue
        if stat.S_ISSOCK(mode):
            attempt("connect", path, lambda: connect(path))
        elif stat.S_ISDIR(mode):
            attempt("list", path, lambda: os.listdir(path))
            name = os.path.join(path, f".attacker-{os.getpid()}")
            attempt("create", path, lambda: os.close(os.open(name, os.O_CREAT | os.O_EXCL, 0o600)))
            attempt("remove", path, lambda: os.unlink(name))
        elif stat.S_ISREG(mode) or stat.S_ISFIFO(mode):
            attempt("read", path, lambda: readable(path))
            attempt("write", path, lambda: readable(path, os.O_WRONLY | os.O_APPEND))


def contents(path):
    """Yields path and content of all readable regular files below a path, without following links below it."""
    if os.path.isdir(path):
        for parent, _, names in os.walk(path):
            for name in names:
                yield from contents(os.path.join(parent, name)) if not os.path.islink(os.path.join(parent, name)) else ()
        return
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):
            yield path, os.pread(file, 4 << 20, 0) if not path.startswith("/proc/") else read_all(file)
    except OSError:
        pass
    finally:
        os.close(file)


def read_all(file):
    """Files of /proc have no size, and return a page per read."""
    text = b""
    while len(text) < 4 << 20 and (more := os.read(file, 1 << 16)):
        text += more
    return text


def secrets(targets):
    for path in targets["paths"]:
        for file, text in contents(path):
            for name, value in targets["secrets"].items():
                if value.encode() in text:
                    print(name, file, flush=True)


def garbage(host, port):
    for bytes_ in [os.urandom(1 << 16), b"\x16\x03\x01\xff\xff" + os.urandom(1 << 14), b"GET / HTTP/1.1\r\n\r\n", b"\0"]:
        try:
            with socket.create_connection((host, int(port)), 10) as client:
                client.sendall(bytes_)
                client.shutdown(socket.SHUT_WR)
                client.settimeout(15)
                while client.recv(1 << 16):
                    pass
        except OSError:
            pass
    print("sent", f"{host}:{port}")


def flood(host, port, count):
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    held = []
    for _ in range(int(count)):
        try:
            held.append(socket.create_connection((host, int(port)), 10))
        except OSError:
            pass
    print("held", len(held), flush=True)
    sys.stdin.read()


command, *args = sys.argv[1:]
if command in ("garbage", "flood"):
    {"garbage": garbage, "flood": flood}[command](*args)
else:
    {"processes": processes, "enumerate": enumerate_, "files": files, "secrets": secrets}[command](json.load(sys.stdin))
