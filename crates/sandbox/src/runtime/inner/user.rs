//! Resolves a container's user in the container's own `/etc/passwd` and `/etc/group`, which are untrusted.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::message::UserPlan;

/// Longer files are truncated.
const MAX_USER_FILE_SIZE: u64 = 1 << 20;

/// The resolved user and groups of a process.
#[derive(Debug, PartialEq, Eq)]
pub struct ResolvedUser {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// All group ids, the primary one included.
    pub groups: Vec<u32>,
    /// Home directory.
    pub home: String,
}

/// Resolves `plan` in the current root directory.
pub fn look_up(plan: &UserPlan) -> Result<ResolvedUser, String> {
    resolve(
        plan,
        &read_regular_file("/etc/passwd"),
        &read_regular_file("/etc/group"),
    )
}

/// Returns an empty string for anything but a regular file: reading a pipe of the image would block forever.
fn read_regular_file(path: impl AsRef<Path>) -> String {
    let mut bytes = Vec::new();
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(path.as_ref(), flags, Mode::empty()).map(File::from)
        && file.metadata().is_ok_and(|found| found.is_file())
    {
        let _ = file.take(MAX_USER_FILE_SIZE).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

struct PasswdEntry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

fn passwd_entries(passwd: &str) -> impl Iterator<Item = PasswdEntry<'_>> {
    passwd.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, _, uid, gid) = (
            fields.next()?,
            fields.next()?,
            fields.next()?,
            fields.next()?,
        );
        Some(PasswdEntry {
            name,
            uid: uid.parse().ok()?,
            gid: gid.parse().ok()?,
            home: fields.nth(1).unwrap_or("/"),
        })
    })
}

fn resolve(plan: &UserPlan, passwd: &str, group: &str) -> Result<ResolvedUser, String> {
    let (user, named_group) = match plan.image_user.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (plan.image_user.as_str(), None),
    };
    // runAsUser overrides the image's user and group.
    let named_group = named_group.filter(|name| plan.uid.is_none() && !name.is_empty());
    let wanted = plan
        .uid
        .map_or_else(|| user.to_owned(), |uid| uid.to_string());
    let wanted = if wanted.is_empty() { "0" } else { &wanted };
    let number = wanted.parse::<u32>().ok();
    let entry = match number {
        Some(uid) => passwd_entries(passwd).find(|entry| entry.uid == uid),
        None => Some(
            passwd_entries(passwd)
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
    let mut groups = plan.supplemental_groups.clone();
    if let Some(entry) = entry.as_ref().filter(|_| !plan.strict_groups) {
        groups.extend(groups_of(entry.name, group));
    }
    groups.push(gid);
    groups.sort_unstable();
    groups.dedup();
    let home = entry.map_or("/", |entry| entry.home);
    Ok(ResolvedUser {
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
    group_entries(group)
        .find(|(found, ..)| *found == name)
        .map(|(_, gid, _)| gid)
        .ok_or_else(|| format!("unable to find group {name}: no matching entries in group file"))
}

fn groups_of<'a>(user: &'a str, group: &'a str) -> impl Iterator<Item = u32> + 'a {
    group_entries(group)
        .filter(move |(_, _, members)| members.split(',').any(|member| member == user))
        .map(|(_, gid, _)| gid)
}

fn group_entries(group: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    group.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, _, gid) = (fields.next()?, fields.next()?, fields.next()?);
        Some((name, gid.parse().ok()?, fields.next().unwrap_or_default()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/sh\nbroken\napp:x:1000:1001:App:/home/app:/bin/sh\n";
    const GROUP: &str = "root:x:0:\nvideo:x:44:app,other\napp:x:1001:\n";

    fn resolve_in_test(
        image_user: &str,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<ResolvedUser, String> {
        let plan = UserPlan {
            uid,
            gid,
            image_user: image_user.to_owned(),
            ..Default::default()
        };
        resolve(&plan, PASSWD, GROUP)
    }

    fn ids(user: &ResolvedUser) -> (u32, u32, &[u32], &str) {
        (user.uid, user.gid, &user.groups, &user.home)
    }

    #[test]
    fn user_is_found_by_name_and_uid() {
        assert_eq!(
            ids(&resolve_in_test("", None, None).unwrap()),
            (0, 0, &[0][..], "/root")
        );
        let app = (1000, 1001, &[44, 1001][..], "/home/app");
        assert_eq!(ids(&resolve_in_test("app", None, None).unwrap()), app);
        assert_eq!(ids(&resolve_in_test("1000", None, None).unwrap()), app);
        assert_eq!(
            ids(&resolve_in_test("root", Some(1000), None).unwrap()),
            app
        );
        assert_eq!(
            ids(&resolve_in_test("app:video", None, None).unwrap()).1,
            44
        );
        assert_eq!(ids(&resolve_in_test("app:7", None, None).unwrap()).1, 7);
        assert_eq!(
            ids(&resolve_in_test("5000", None, None).unwrap()),
            (5000, 0, &[0][..], "/")
        );
        assert_eq!(
            ids(&resolve_in_test("app:video", Some(5000), Some(9)).unwrap()),
            (5000, 9, &[9][..], "/")
        );
    }

    #[test]
    fn only_regular_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let mode = Mode::RUSR | Mode::WUSR;
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).unwrap();
        assert_eq!(read_regular_file(&pipe), "");
        assert_eq!(read_regular_file(dir.path()), "");
        assert_eq!(read_regular_file("/dev/zero"), "");
        assert_eq!(read_regular_file(dir.path().join("none")), "");
        std::fs::write(dir.path().join("file"), PASSWD).unwrap();
        assert_eq!(read_regular_file(dir.path().join("file")), PASSWD);
    }

    #[test]
    fn unknown_user_and_group_are_errors() {
        assert!(
            resolve_in_test("no-such-user", None, None)
                .unwrap_err()
                .contains("no-such-user")
        );
        assert!(
            resolve_in_test("app:none", None, None)
                .unwrap_err()
                .contains("none")
        );
    }
}
