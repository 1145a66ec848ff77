//! Resource usage of processes from `/proc`, for hosts where no cgroup accounts for it.
//!
//! A [`ProcessTable`] is a snapshot of all processes. Processes of one tree are found by descent. The [`ProcessSample`] of a
//! process contains its own usage and that of the children that it has waited for. If `/proc` is mounted with `hidepid`,
//! a table lacks [non-dumpable](crate::credentials::set_non_dumpable) processes.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

/// For larger processes the kernel takes too long to compute the proportional set size, and stalls the process meanwhile.
const MAX_PSS_RESIDENT: u64 = 1 << 30;

/// A snapshot of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessSample {
    /// The pid of its parent or reaper.
    pub parent: i32,
    /// CPU time of the process and of the children that it has waited for.
    pub cpu: Duration,
    /// CPU time of the process alone.
    pub own_cpu: Duration,
    /// Minor and major page faults of the process and of the children that it has waited for.
    pub page_faults: (u64, u64),
    /// Resident bytes; shared pages count in full.
    pub resident: u64,
    /// Bytes of virtual memory.
    pub virtual_bytes: u64,
    /// Start time in clock ticks since boot. Together with the pid it identifies the process uniquely.
    pub started: u64,
}

/// All visible processes by pid.
#[derive(Clone, Debug, Default)]
pub struct ProcessTable(HashMap<i32, ProcessSample>);

impl ProcessTable {
    /// Reads all visible processes. Processes that exit meanwhile are left out.
    pub fn read() -> io::Result<Self> {
        let mut found = HashMap::new();
        for entry in std::fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let pid = name.to_str().and_then(|name| name.parse().ok());
            if let Some((pid, sample)) = pid.and_then(|pid| Some((pid, ProcessSample::of(pid)?))) {
                found.insert(pid, sample);
            }
        }
        Ok(Self(found))
    }

    /// Reads only `root` and its descendants. `None` if the kernel lists no children, or does not show `root`.
    pub fn read_subtree(root: i32) -> Option<Self> {
        ProcessSample::of(root)?;
        let mut found = HashMap::new();
        let mut next = vec![root];
        while let Some(pid) = next.pop() {
            let Some(sample) = ProcessSample::of(pid) else {
                continue;
            };
            found.insert(pid, sample);
            match crate::process::children(pid) {
                Ok(children) => next.extend(children),
                // The process has exited.
                Err(_) if ProcessSample::of(pid).is_none() => {}
                Err(_) => return None,
            }
        }
        Some(Self(found))
    }

    /// The sample of one process.
    pub fn get(&self, pid: i32) -> Option<&ProcessSample> {
        self.0.get(&pid)
    }

    /// The pids of all processes in the table.
    pub fn pids(&self) -> impl Iterator<Item = i32> {
        self.0.keys().copied()
    }

    /// All processes of the table that are in `roots` or descend from them. The roots themselves need not be visible.
    pub fn subtree(&self, roots: impl IntoIterator<Item = i32>) -> HashSet<i32> {
        let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
        for (&pid, sample) in &self.0 {
            children.entry(sample.parent).or_default().push(pid);
        }
        let mut found = HashSet::new();
        let mut next: Vec<i32> = roots.into_iter().collect();
        while let Some(pid) = next.pop() {
            if found.insert(pid) {
                next.extend(children.get(&pid).into_iter().flatten());
            }
        }
        found.retain(|pid| self.0.contains_key(pid));
        found
    }

    /// The total CPU time of these processes.
    pub fn cpu<'a>(&self, pids: impl IntoIterator<Item = &'a i32>) -> Duration {
        pids.into_iter()
            .filter_map(|pid| self.0.get(pid))
            .map(|sample| sample.cpu)
            .sum()
    }
}

impl ProcessSample {
    /// Reads one process; `None` if it does not exist or is not visible.
    pub fn of(pid: i32) -> Option<Self> {
        let stat = crate::process::stat_of(pid).ok()?;
        Self::parse(&stat, rustix::param::clock_ticks_per_second(), page_size())
    }

    /// Parses the text of `/proc/PID/stat`. The command name is in parentheses and may itself contain parentheses and spaces, so
    /// the fields are counted from the last parenthesis.
    fn parse(stat: &str, ticks_per_second: u64, page_size: u64) -> Option<Self> {
        let (_, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        // The first field after the name is field 3 of proc(5).
        let number = |field: usize| -> Option<u64> { fields.get(field - 3)?.parse().ok() };
        // The kernel prints the children's times as signed numbers, but they are never negative.
        let time = |fields: &[usize]| {
            let ticks: u64 = fields.iter().filter_map(|field| number(*field)).sum();
            Duration::from_nanos(ticks.saturating_mul(1_000_000_000 / ticks_per_second.max(1)))
        };
        Some(Self {
            parent: fields.get(1)?.parse().ok()?,
            cpu: time(&[14, 15, 16, 17]),
            own_cpu: time(&[14, 15]),
            page_faults: (number(10)? + number(11)?, number(12)? + number(13)?),
            virtual_bytes: number(23)?,
            resident: number(24)?.saturating_mul(page_size),
            started: number(22)?,
        })
    }
}

/// Memory of a process; a page shared by several processes counts proportionally (PSS).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// All bytes.
    pub all: u64,
    /// Bytes that are not backed by a file.
    pub anonymous: u64,
    /// Bytes in swap; `None` if the kernel does not report them.
    pub swap: Option<u64>,
}

impl ProcessMemory {
    /// Memory of the process in `sample`. Shared pages count in full where PSS is not available: for very large processes and for
    /// those of other users. Of our own [non-dumpable](crate::credentials::set_non_dumpable) processes only anonymous pages count,
    /// because they all share one executable.
    pub fn of(pid: i32, sample: &ProcessSample) -> Self {
        // Names of programs and of mapped files may not be valid UTF-8.
        let file = |name: &str| {
            let bytes = std::fs::read(format!("/proc/{pid}/{name}")).ok()?;
            Some(String::from_utf8_lossy(&bytes).into_owned())
        };
        if sample.resident <= MAX_PSS_RESIDENT
            && let Some(text) = file("smaps_rollup")
            && let Some(all) = kilobytes(&text, "Pss:")
        {
            let anonymous =
                kilobytes(&text, "Pss_Anon:").or_else(|| kilobytes(&text, "Anonymous:"));
            let anonymous = anonymous.unwrap_or(0);
            let swap = kilobytes(&text, "SwapPss:");
            return Self {
                all,
                anonymous,
                swap,
            };
        }
        let status = file("status").unwrap_or_default();
        let all = kilobytes(&status, "VmRSS:").unwrap_or(sample.resident);
        let anonymous = kilobytes(&status, "RssAnon:").unwrap_or(0);
        let swap = kilobytes(&status, "VmSwap:");
        let all = if is_non_dumpable(pid) { anonymous } else { all };
        Self {
            all,
            anonymous,
            swap,
        }
    }
}

/// Whether a process of this user is non-dumpable.
fn is_non_dumpable(pid: i32) -> bool {
    let user = rustix::process::geteuid().as_raw();
    let is_ours = std::fs::metadata(format!("/proc/{pid}")).is_ok_and(|found| found.uid() == user);
    let refused = |error: io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    is_ours && std::fs::read_link(format!("/proc/{pid}/cwd")).is_err_and(refused)
}

/// Bytes that a process, and the children that it has waited for, read from and wrote to disks. Accesses to the page cache or to
/// a tmpfs do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskBytes {
    /// From disks.
    pub read: u64,
    /// To disks, including pages that are not written back yet.
    pub written: u64,
}

impl DiskBytes {
    /// Of a process; `None` if it belongs to another user, or if the kernel does not account for it.
    pub fn of(pid: i32) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().parse().ok()
        };
        Some(Self {
            read: field("read_bytes:")?,
            written: field("write_bytes:")?,
        })
    }
}

/// The pid of the process of a pidfd; `None` if it has exited.
pub fn pid_of_pidfd(process: impl AsFd) -> Option<i32> {
    let path = format!("/proc/self/fdinfo/{}", process.as_fd().as_raw_fd());
    let text = std::fs::read_to_string(path).ok()?;
    let pid: i32 = text
        .lines()
        .find_map(|line| line.strip_prefix("Pid:"))?
        .trim()
        .parse()
        .ok()?;
    (pid > 0).then_some(pid)
}

/// Boot time in seconds since the epoch.
pub fn boot_time() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("btime "))?;
    line.trim().parse().ok()
}

/// Traffic counters of a network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InterfaceTraffic {
    /// Its name.
    pub name: String,
    /// Incoming traffic.
    pub received: TrafficCounters,
    /// Outgoing traffic.
    pub sent: TrafficCounters,
}

/// Counters for one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficCounters {
    /// Bytes.
    pub bytes: u64,
    /// Packets.
    pub packets: u64,
    /// Packets with errors.
    pub errors: u64,
    /// Packets dropped for lack of buffers.
    pub dropped: u64,
}

/// The interfaces of the network namespace of a process; empty if it has exited.
pub fn interfaces(pid: i32) -> Vec<InterfaceTraffic> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap_or_default();
    parse_interfaces(&text)
}

fn parse_interfaces(text: &str) -> Vec<InterfaceTraffic> {
    let parse = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let numbers: Vec<u64> = rest
            .split_whitespace()
            .map(|number| number.parse().ok())
            .collect::<Option<_>>()?;
        let traffic = |numbers: &[u64]| TrafficCounters {
            bytes: numbers[0],
            packets: numbers[1],
            errors: numbers[2],
            dropped: numbers[3],
        };
        (numbers.len() >= 12).then(|| InterfaceTraffic {
            name: name.trim().to_owned(),
            received: traffic(&numbers),
            sent: traffic(&numbers[8..]),
        })
    };
    text.lines().filter_map(parse).collect()
}

/// The value of a line such as `Pss:      120 kB`, in bytes.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let number: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(number.saturating_mul(1024))
}

fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::testing::{hidden_child, in_a_child_with_hidepid};

    #[test]
    fn fields_are_parsed_after_parentheses_in_names() {
        let stat = "12 (a) b (c) S 7 12 12 0 -1 4194560 10 20 3 4 100 50 30 20 20 0 1 0 900 8192000 25 18446744073709551615 1 1";
        let sample = ProcessSample::parse(stat, 100, 4096).unwrap();
        assert_eq!(
            sample,
            ProcessSample {
                parent: 7,
                cpu: Duration::from_secs(2),
                own_cpu: Duration::from_millis(1500),
                page_faults: (30, 7),
                resident: 25 * 4096,
                virtual_bytes: 8_192_000,
                started: 900,
            }
        );
        assert_eq!(ProcessSample::parse("12 (a", 100, 4096), None);
        assert_eq!(ProcessSample::parse("12 (a) S 7", 100, 4096), None);
    }

    #[test]
    fn memory_and_descendants_are_found() {
        let mut child = Command::new("sh")
            .args(["-c", "sleep 60 & wait"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        let mut below = HashSet::new();
        let end = std::time::Instant::now() + Duration::from_secs(5);
        while below.len() < 2 && std::time::Instant::now() < end {
            let table = ProcessTable::read().unwrap();
            below = table.subtree([pid]);
            if let Some(own) = ProcessTable::read_subtree(pid) {
                assert!(own.get(pid).is_some());
            }
        }
        let ours = ProcessSample::of(std::process::id() as i32).unwrap();
        let memory = ProcessMemory::of(std::process::id() as i32, &ours);
        for pid in &below {
            let pid = rustix::process::Pid::from_raw(*pid).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        child.wait().unwrap();
        assert_eq!(below.len(), 2);
        assert!(memory.all > 100 << 10 && memory.anonymous <= memory.all);
        assert!(boot_time().unwrap() > 1_000_000_000);
    }

    #[test]
    fn descendants_of_an_invisible_process_are_found() {
        assert!(in_a_child_with_hidepid(|| {
            let hidden = hidden_child(|| drop(Command::new("sleep").arg("60").spawn().unwrap()));
            assert!(ProcessTable::read_subtree(hidden).is_none());
            let below = || ProcessTable::read().unwrap().subtree([hidden]);
            // Until it calls exec, the child of the non-dumpable process is non-dumpable too.
            let end = std::time::Instant::now() + Duration::from_secs(5);
            while below().is_empty() && std::time::Instant::now() < end {
                std::thread::sleep(Duration::from_millis(2));
            }
            let found = below();
            found.len() == 1 && !found.contains(&hidden)
        }));
    }

    #[test]
    fn only_disk_bytes_are_counted() {
        let text = "rchar: 9\nwchar: 8\nsyscr: 7\nsyscw: 6\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 1\n";
        let bytes = DiskBytes {
            read: 4096,
            written: 8192,
        };
        assert_eq!(DiskBytes::parse(text), Some(bytes));
        assert_eq!(DiskBytes::parse("rchar: 9\n"), None);
        assert!(DiskBytes::of(std::process::id() as i32).is_some());
    }

    #[test]
    fn interface_counters_are_parsed() {
        let text = "Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    1000      10    0    0    0     0          0         0     1000      10    0    0    0     0       0          0
  eth0: 2048 20 1 2 0 0 0 0 4096 40 3 4 0 0 0 0
  odd: 1 2
";
        let found = parse_interfaces(text);
        assert_eq!(found.len(), 2);
        assert_eq!(found[1].name, "eth0");
        assert_eq!(
            (
                found[1].received.bytes,
                found[1].sent.bytes,
                found[1].sent.dropped
            ),
            (2048, 4096, 4)
        );
    }
}
