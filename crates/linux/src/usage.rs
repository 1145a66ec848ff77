//! What processes use, by what `/proc` tells everybody: for where no control group counts it.
//!
//! A [`Table`] is one look at all processes. Who belongs together is found by descent; what one of them has used is in its
//! [`Sample`], and that of the children that it has waited for with it. Where `/proc` is mounted with `hidepid`, processes that
//! [hide](crate::credentials::hide) are in no table.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

/// Beyond this, adding up shares of pages takes the kernel too long, and holds the process up.
const LARGEST_SHARED_OUT: u64 = 1 << 30;

/// One process at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Who started it, or who has inherited it.
    pub parent: i32,
    /// Of processors, by itself and by children that it has waited for.
    pub cpu: Duration,
    /// Of processors, by itself alone.
    pub own_cpu: Duration,
    /// Page faults of itself and of such children, and those that had to read.
    pub page_faults: (u64, u64),
    /// Bytes that are in memory, shared ones in full.
    pub resident: u64,
    /// Bytes of addresses.
    pub addresses: u64,
    /// Ticks of the clock between the start of the machine and its own. With its number, this names it for ever.
    pub started: u64,
}

/// All processes that can be seen, by number.
#[derive(Clone, Debug, Default)]
pub struct Table(HashMap<i32, Sample>);

impl Table {
    /// Looks at all of them. Those that end meanwhile are left out.
    pub fn read() -> io::Result<Self> {
        let mut found = HashMap::new();
        for entry in std::fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let pid = name.to_str().and_then(|name| name.parse().ok());
            if let Some((pid, sample)) = pid.and_then(|pid| Some((pid, Sample::of(pid)?))) {
                found.insert(pid, sample);
            }
        }
        Ok(Self(found))
    }

    /// Looks at `root` and all that descends from it, and at no other process. `None` if the kernel doesn't tell of children, or doesn't
    /// show `root`.
    pub fn below(root: i32) -> Option<Self> {
        Sample::of(root)?;
        let mut found = HashMap::new();
        let mut next = vec![root];
        while let Some(pid) = next.pop() {
            let Some(sample) = Sample::of(pid) else {
                continue;
            };
            found.insert(pid, sample);
            match crate::process::children(pid) {
                Ok(children) => next.extend(children),
                // A process that has ended meanwhile has none.
                Err(_) if Sample::of(pid).is_none() => {}
                Err(_) => return None,
            }
        }
        Some(Self(found))
    }

    /// One of them.
    pub fn get(&self, pid: i32) -> Option<&Sample> {
        self.0.get(&pid)
    }

    /// Their numbers.
    pub fn pids(&self) -> impl Iterator<Item = i32> {
        self.0.keys().copied()
    }

    /// Those of `roots` that are there, and all that descend from one of them, whether or not that can be seen.
    pub fn tree(&self, roots: impl IntoIterator<Item = i32>) -> HashSet<i32> {
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

    /// What these of them have used of processors together.
    pub fn cpu<'a>(&self, pids: impl IntoIterator<Item = &'a i32>) -> Duration {
        pids.into_iter()
            .filter_map(|pid| self.0.get(pid))
            .map(|sample| sample.cpu)
            .sum()
    }
}

impl Sample {
    /// Looks at one process; `None` if there is none, or it can't be seen.
    pub fn of(pid: i32) -> Option<Self> {
        let stat = crate::process::stat_of(pid).ok()?;
        Self::parse(&stat, rustix::param::clock_ticks_per_second(), page())
    }

    /// The text of `/proc/PID/stat`. The command's name stands in parentheses and may itself hold parentheses and
    /// spaces, so that fields are counted from the last one.
    fn parse(stat: &str, ticks_per_second: u64, page: u64) -> Option<Self> {
        let (_, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        // The first field after the name is the third of proc(5).
        let number = |field: usize| -> Option<u64> { fields.get(field - 3)?.parse().ok() };
        // Children's times are signed in the kernel's own text, and never negative.
        let time = |fields: &[usize]| {
            let ticks: u64 = fields.iter().filter_map(|field| number(*field)).sum();
            Duration::from_nanos(ticks.saturating_mul(1_000_000_000 / ticks_per_second.max(1)))
        };
        Some(Self {
            parent: fields.get(1)?.parse().ok()?,
            cpu: time(&[14, 15, 16, 17]),
            own_cpu: time(&[14, 15]),
            page_faults: (number(10)? + number(11)?, number(12)? + number(13)?),
            addresses: number(23)?,
            resident: number(24)?.saturating_mul(page),
            started: number(22)?,
        })
    }
}

/// Memory of a process, each page that it shares with others counted in part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// All bytes.
    pub all: u64,
    /// Those that belong to no file.
    pub anonymous: u64,
    /// Bytes that were put out to swap; `None` if the kernel doesn't tell.
    pub swap: Option<u64>,
}

impl Memory {
    /// Of a process that `sample` shows. Pages count in full where their shares can't be told: in processes that are very
    /// large, or not ours. Of our own that [hide](crate::credentials::hide) only the anonymous ones count: their program is shared by
    /// all of them.
    pub fn of(pid: i32, sample: &Sample) -> Self {
        // Names of programs and of mapped files are no text that one could rely on.
        let file = |name: &str| {
            let bytes = std::fs::read(format!("/proc/{pid}/{name}")).ok()?;
            Some(String::from_utf8_lossy(&bytes).into_owned())
        };
        if sample.resident <= LARGEST_SHARED_OUT
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
        let all = if is_hidden(pid) { anonymous } else { all };
        Self {
            all,
            anonymous,
            swap,
        }
    }
}

/// Whether a process of this user can't be looked into.
fn is_hidden(pid: i32) -> bool {
    let user = rustix::process::geteuid().as_raw();
    let is_ours = std::fs::metadata(format!("/proc/{pid}")).is_ok_and(|found| found.uid() == user);
    let refused = |error: io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    is_ours && std::fs::read_link(format!("/proc/{pid}/cwd")).is_err_and(refused)
}

/// Bytes that a process, and children that it has waited for, had read from disks and written to them. What was found in memory
/// or stays there, as all on a tmpfs does, is none of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskBytes {
    /// From disks.
    pub read: u64,
    /// To disks, sooner or later.
    pub written: u64,
}

impl DiskBytes {
    /// Of a process; `None` if it can't be told, because it is somebody else's or the kernel doesn't count.
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

/// The number of the process that a descriptor of a process stands for; `None` when it has ended.
pub fn pid_of(process: impl AsFd) -> Option<i32> {
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

/// When the machine was started, in seconds since 1970.
pub fn boot_time() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("btime "))?;
    line.trim().parse().ok()
}

/// What went through an interface of a network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// What came in.
    pub received: Traffic,
    /// What went out.
    pub sent: Traffic,
}

/// Counters of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes.
    pub bytes: u64,
    /// Packets.
    pub packets: u64,
    /// Packets that were wrong.
    pub errors: u64,
    /// Packets that there was no room for.
    pub dropped: u64,
}

/// The interfaces of the network that a process is in; none if it has ended.
pub fn interfaces(pid: i32) -> Vec<Interface> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap_or_default();
    parse_interfaces(&text)
}

fn parse_interfaces(text: &str) -> Vec<Interface> {
    let parse = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let numbers: Vec<u64> = rest
            .split_whitespace()
            .map(|number| number.parse().ok())
            .collect::<Option<_>>()?;
        let traffic = |numbers: &[u64]| Traffic {
            bytes: numbers[0],
            packets: numbers[1],
            errors: numbers[2],
            dropped: numbers[3],
        };
        (numbers.len() >= 12).then(|| Interface {
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

fn page() -> u64 {
    rustix::param::page_size() as u64
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::testing::{hidden_child, in_a_child_with_hidepid};

    #[test]
    fn fields_are_found_behind_an_awkward_name() {
        let stat = "12 (a) b (c) S 7 12 12 0 -1 4194560 10 20 3 4 100 50 30 20 20 0 1 0 900 8192000 25 18446744073709551615 1 1";
        let sample = Sample::parse(stat, 100, 4096).unwrap();
        assert_eq!(
            sample,
            Sample {
                parent: 7,
                cpu: Duration::from_secs(2),
                own_cpu: Duration::from_millis(1500),
                page_faults: (30, 7),
                resident: 25 * 4096,
                addresses: 8_192_000,
                started: 900,
            }
        );
        assert_eq!(Sample::parse("12 (a", 100, 4096), None);
        assert_eq!(Sample::parse("12 (a) S 7", 100, 4096), None);
    }

    #[test]
    fn this_process_uses_memory_and_its_children_are_found() {
        let mut child = Command::new("sh")
            .args(["-c", "sleep 60 & wait"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        let mut below = HashSet::new();
        let end = std::time::Instant::now() + Duration::from_secs(5);
        while below.len() < 2 && std::time::Instant::now() < end {
            let table = Table::read().unwrap();
            below = table.tree([pid]);
            if let Some(own) = Table::below(pid) {
                assert!(own.get(pid).is_some());
            }
        }
        let ours = Sample::of(std::process::id() as i32).unwrap();
        let memory = Memory::of(std::process::id() as i32, &ours);
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
    fn what_descends_from_a_process_that_is_not_shown_is_found() {
        assert!(in_a_child_with_hidepid(|| {
            let hidden = hidden_child(|| drop(Command::new("sleep").arg("60").spawn().unwrap()));
            assert!(Table::below(hidden).is_none());
            let below = || Table::read().unwrap().tree([hidden]);
            // Until it is another program, the child of the hidden process hides too.
            let end = std::time::Instant::now() + Duration::from_secs(5);
            while below().is_empty() && std::time::Instant::now() < end {
                std::thread::sleep(Duration::from_millis(2));
            }
            let found = below();
            found.len() == 1 && !found.contains(&hidden)
        }));
    }

    #[test]
    fn bytes_of_disks_are_not_those_of_calls() {
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
    fn counters_of_interfaces_are_read() {
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
