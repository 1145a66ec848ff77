//! The state of a lab's hosts, to detect leftovers of a cluster.

use std::collections::BTreeSet;

use crate::Lab;

/// Prints a line for each process, file, socket, port, mount, namespace and IPC object. Seeds are kept on purpose.
const INSPECT: &str = r#"
ps -ww -eo uid=,pid=,stat=,args= | awk '($1 == 2001 || $1 == 2002 || ($1 >= 200000 && $1 < 265536)) { print "process: " $0 }'
find /tmp /var/tmp /dev/shm /dev/mqueue /run/lock /run/user -mindepth 1 2>/dev/null | sed 's/^/file: /'
ls -d /run/* | sed 's/^/file: /'
find /home -mindepth 2 -path '/home/*/.cache/coracle/seeds/*' -prune -o \
  -path '/home/*/.local/share/coracle/*' -prune -o \
  -path '/home/*/.cache' -o -path '/home/*/.cache/coracle' -o -path '/home/*/.cache/coracle/seeds' -o \
  -path '/home/*/.local' -o -path '/home/*/.local/share' -o -path '/home/*/.local/share/coracle' -o -print | sed 's/^/home: /'
find /home/*/.cache/coracle/seeds -maxdepth 1 -name '.*' -printf 'incomplete seed: %p\n' 2>/dev/null
awk 'NR > 1 { print "socket: " $8 }' /proc/net/unix | grep -v ': $' | sort -u
ss -H -l -t -n | awk '{ print "port: " $4 }'
ss -H -l -u -n | awk '{ print "port: " $4 }'
awk '{ print "mount: " $5, $(NF-2), $(NF-1) }' /proc/1/mountinfo
lsns --noheadings --output TYPE,NS | sed 's/^/namespace: /' | sort -u
ipcs -m -q -s | awk '$3 == "user1" || $3 == "user2" { print "ipc: " $0 }'
"#;

/// The lines of all hosts, each prefixed by its host.
#[derive(Debug, Clone, Default)]
pub(crate) struct LabState(BTreeSet<String>);

impl LabState {
    /// Inspects all hosts in parallel.
    pub(crate) fn inspect(lab: &Lab) -> Self {
        let hosts: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = lab
                .hosts()
                .iter()
                .map(|host| scope.spawn(move || (host, lab.root(host, INSPECT).stdout)))
                .collect();
            threads
                .into_iter()
                .filter_map(|thread| thread.join().ok())
                .collect()
        });
        assert_eq!(hosts.len(), lab.hosts().len(), "all hosts can be inspected");
        let lines = hosts
            .iter()
            .flat_map(|(host, text)| text.lines().map(move |line| format!("{host}: {line}")));
        Self(lines.filter(|line| !is_slurm_socket(line)).collect())
    }

    /// Lines that `before` does not have.
    pub(crate) fn beyond(&self, before: &Self) -> Vec<String> {
        self.0.difference(&before.0).cloned().collect()
    }

    /// Adds lines of `now` with this prefix to the snapshot.
    pub(crate) fn add(&mut self, now: &Self, prefix: &str) {
        let added = now.0.iter().filter(|line| line.starts_with(prefix));
        self.0.extend(added.cloned());
    }

    /// Lines that must not exist in an idle lab.
    pub(crate) fn leftovers(&self) -> Vec<&String> {
        let is_leftover = |line: &&String| {
            line.contains(": process: ")
                || line.contains(": file: /tmp/")
                || line.contains(": file: /dev/shm/")
        };
        self.0.iter().filter(is_leftover).collect()
    }
}

/// Slurm opens and closes abstract sockets at any time.
fn is_slurm_socket(line: &str) -> bool {
    line.contains("socket: @") && line.contains("slurm")
}
