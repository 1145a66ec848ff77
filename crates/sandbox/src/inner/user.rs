//! Looking up a container's user in the container's own files, which nobody should trust.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::message::UserPlan;

/// No honest file is longer.
const MAX_FILE: u64 = 1 << 20;

/// Who a process will be.
#[derive(Debug, PartialEq, Eq)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Other groups.
    pub groups: Vec<u32>,
    /// Home directory.
    pub home: String,
}

/// Finds out in the current root directory.
pub fn look_up(plan: &UserPlan) -> Result<User, String> {
    resolve(plan, &read("/etc/passwd"), &read("/etc/group"))
}

/// What is no regular file is empty: an image may have a pipe there, at which one would wait for ever.
fn read(path: impl AsRef<Path>) -> String {
    let mut bytes = Vec::new();
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(path.as_ref(), flags, Mode::empty()).map(File::from)
        && file.metadata().is_ok_and(|found| found.is_file())
    {
        let _ = file.take(MAX_FILE).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

struct Entry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

fn entries(passwd: &str) -> impl Iterator<Item = Entry<'_>> {
    passwd.lines().filter_map(|line| {
        let mut words = line.split(':');
        let (name, _, uid, gid) = (words.next()?, words.next()?, words.next()?, words.next()?);
        Some(Entry {
            name,
            uid: uid.parse().ok()?,
            gid: gid.parse().ok()?,
            home: words.nth(1).unwrap_or("/"),
        })
    })
}

fn resolve(plan: &UserPlan, passwd: &str, group: &str) -> Result<User, String> {
    let (user, named_group) = match plan.name.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (plan.name.as_str(), None),
    };
    // What the image says of the group belongs to what it says of the user.
    let named_group = named_group.filter(|name| plan.uid.is_none() && !name.is_empty());
    let wanted = plan
        .uid
        .map_or_else(|| user.to_owned(), |uid| uid.to_string());
    let wanted = if wanted.is_empty() { "0" } else { &wanted };
    let number = wanted.parse::<u32>().ok();
    let entry = match number {
        Some(uid) => entries(passwd).find(|entry| entry.uid == uid),
        None => Some(
            entries(passwd)
                .find(|entry| entry.name == wanted)
                .ok_or_else(|| {
                    format!("unable to find user {wanted}: no matching entries in passwd file")
                })?,
        ),
    };
    let uid = entry
        .as_ref()
        .map(|entry| entry.uid)
        .or(number)
        .unwrap_or(0);
    let gid = match (plan.gid, named_group) {
        (Some(gid), _) => gid,
        (None, Some(name)) => group_id(name, group)?,
        (None, None) => entry.as_ref().map_or(0, |entry| entry.gid),
    };
    let mut groups = plan.groups.clone();
    if let Some(entry) = entry.as_ref().filter(|_| !plan.groups_strict) {
        groups.extend(groups_of(entry.name, group));
    }
    groups.push(gid);
    groups.sort_unstable();
    groups.dedup();
    let home = entry.map_or("/", |entry| entry.home);
    Ok(User {
        uid,
        gid,
        groups,
        home: if home.is_empty() { "/" } else { home }.to_owned(),
    })
}

fn group_id(name: &str, group: &str) -> Result<u32, String> {
    if let Ok(gid) = name.parse() {
        return Ok(gid);
    }
    group_lines(group)
        .find(|(found, ..)| *found == name)
        .map(|(_, gid, _)| gid)
        .ok_or_else(|| format!("unable to find group {name}: no matching entries in group file"))
}

fn groups_of<'a>(user: &'a str, group: &'a str) -> impl Iterator<Item = u32> + 'a {
    group_lines(group)
        .filter(move |(_, _, members)| members.split(',').any(|member| member == user))
        .map(|(_, gid, _)| gid)
}

fn group_lines(group: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    group.lines().filter_map(|line| {
        let mut words = line.split(':');
        let (name, _, gid) = (words.next()?, words.next()?, words.next()?);
        Some((name, gid.parse().ok()?, words.next().unwrap_or_default()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/sh\nbroken\napp:x:1000:1001:App:/home/app:/bin/sh\n";
    const GROUP: &str = "root:x:0:\nvideo:x:44:app,other\napp:x:1001:\n";

    fn ask(name: &str, uid: Option<u32>, gid: Option<u32>) -> Result<User, String> {
        let plan = UserPlan {
            uid,
            gid,
            name: name.to_owned(),
            ..Default::default()
        };
        resolve(&plan, PASSWD, GROUP)
    }

    fn ids(user: &User) -> (u32, u32, &[u32], &str) {
        (user.uid, user.gid, &user.groups, &user.home)
    }

    #[test]
    fn users_are_found_by_name_and_number() {
        assert_eq!(
            ids(&ask("", None, None).unwrap()),
            (0, 0, &[0][..], "/root")
        );
        let app = (1000, 1001, &[44, 1001][..], "/home/app");
        assert_eq!(ids(&ask("app", None, None).unwrap()), app);
        assert_eq!(ids(&ask("1000", None, None).unwrap()), app);
        assert_eq!(ids(&ask("root", Some(1000), None).unwrap()), app);
        assert_eq!(ids(&ask("app:video", None, None).unwrap()).1, 44);
        assert_eq!(ids(&ask("app:7", None, None).unwrap()).1, 7);
        assert_eq!(
            ids(&ask("5000", None, None).unwrap()),
            (5000, 0, &[0][..], "/")
        );
        assert_eq!(
            ids(&ask("app:video", Some(5000), Some(9)).unwrap()),
            (5000, 9, &[9][..], "/")
        );
    }

    #[test]
    fn nobody_waits_for_a_file_that_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let mode = Mode::RUSR | Mode::WUSR;
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).unwrap();
        assert_eq!(read(&pipe), "");
        assert_eq!(read(dir.path()), "");
        assert_eq!(read("/dev/zero"), "");
        assert_eq!(read(dir.path().join("none")), "");
        std::fs::write(dir.path().join("file"), PASSWD).unwrap();
        assert_eq!(read(dir.path().join("file")), PASSWD);
    }

    #[test]
    fn unknown_names_are_refused() {
        assert!(
            ask("nobody-here", None, None)
                .unwrap_err()
                .contains("nobody-here")
        );
        assert!(ask("app:none", None, None).unwrap_err().contains("none"));
    }
}
