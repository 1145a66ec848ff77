//! Checks the structure of the source: dependencies between crates, between commands, and the names of roles.
//! docs/architecture.md describes the crates.

// Clippy's exception for tests does not apply to helpers of integration tests.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The crates that each crate may depend on: only crates below it. `coracle` is not in the list, because it may use all.
/// Tests of a crate may use more.
const ALLOWED: [(&str, &[&str]); 17] = [
    (
        "cluster",
        &[
            "client-auth",
            "console",
            "control-plane",
            "linux",
            "network",
            "releases",
            "slurm",
        ],
    ),
    ("control-plane", &["linux"]),
    ("releases", &["console", "download", "linux"]),
    ("slurm", &[]),
    (
        "kubelet",
        &[
            "client-auth",
            "kubelet-api",
            "linux",
            "network",
            "pod-protocol",
            "quantity",
            "volumes",
        ],
    ),
    ("metrics-api", &["client-auth", "kubelet-api"]),
    ("kubelet-api", &["client-auth", "linux", "quantity"]),
    ("sandbox", &["linux", "pod-protocol", "quantity"]),
    ("images", &["download", "linux"]),
    ("volumes", &["linux", "quantity"]),
    ("network", &["linux"]),
    ("pod-protocol", &[]),
    ("client-auth", &[]),
    ("console", &[]),
    ("download", &[]),
    ("quantity", &[]),
    ("linux", &[]),
];

/// Crates that know nothing of each other; `coracle` connects them.
const SIBLINGS: [&str; 4] = ["sandbox", "images", "volumes", "network"];

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The names in a directory, without extensions.
fn names_in(dir: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(dir).unwrap();
    let stem = |path: PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
    entries.map(|entry| stem(entry.unwrap().path())).collect()
}

/// The crates of the workspace that a crate depends on, without those of its tests.
fn dependencies(name: &str, all: &BTreeSet<String>) -> BTreeSet<String> {
    let manifest = fs::read_to_string(crates().join(name).join("Cargo.toml")).unwrap();
    let section = manifest
        .lines()
        .skip_while(|line| *line != "[dependencies]");
    let section = section.skip(1).take_while(|line| !line.starts_with('['));
    let names = section.filter_map(|line| line.split(['.', ' ', '=']).next());
    names
        .filter(|name| all.contains(*name))
        .map(str::to_owned)
        .collect()
}

/// All source files below a directory.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.extend(sources(&path)),
            false => files.push(path),
        }
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == "rs"));
    files
}

#[test]
fn crates_depend_only_on_crates_below() {
    let all = names_in(&crates());
    let mut listed = BTreeSet::from(["coracle".to_owned()]);
    for (index, (name, allowed)) in ALLOWED.iter().enumerate() {
        listed.insert((*name).to_owned());
        for dependency in dependencies(name, &all) {
            assert!(
                allowed.contains(&dependency.as_str()),
                "{name} must not depend on {dependency}"
            );
        }
        for dependency in *allowed {
            let at = ALLOWED.iter().position(|(name, _)| name == dependency);
            assert!(at > Some(index), "{dependency} is not below {name}");
            let sideways = SIBLINGS.contains(name) && SIBLINGS.contains(dependency);
            assert!(!sideways, "{dependency} is beside {name}");
        }
    }
    assert_eq!(all, listed);
}

#[test]
fn crates_say_where_to_start_reading() {
    for name in names_in(&crates()) {
        let root = crates().join(&name).join("src");
        let lib = fs::read_to_string(root.join("lib.rs"));
        let text = lib
            .or_else(|_| fs::read_to_string(root.join("main.rs")))
            .unwrap();
        let mut comment = text.lines().take_while(|line| line.starts_with("//!"));
        assert!(
            comment.any(|line| line.contains("Start reading at")),
            "{name}"
        );
    }
}

#[test]
fn commands_use_nothing_of_each_other() {
    let commands = crates().join("coracle/src/commands");
    let names = names_in(&commands);
    for file in sources(&crates().join("coracle/src")) {
        let text = fs::read_to_string(&file).unwrap();
        let within = file.strip_prefix(&commands).ok();
        let own = within.map(|path| path.components().next().unwrap().as_os_str());
        let own = own.map(|own| Path::new(own).file_stem().unwrap().to_str().unwrap());
        // The command line names the arguments of all commands, and `main` calls them.
        if ["cli.rs", "main.rs"]
            .iter()
            .any(|name| file.ends_with(name))
        {
            continue;
        }
        for other in names.iter().filter(|name| Some(name.as_str()) != own) {
            let path = format!("commands::{other}");
            assert!(!text.contains(&path), "{} uses {path}", file.display());
        }
    }
}

#[test]
fn roles_are_named_like_their_modules() {
    let help = Command::new(env!("CARGO_BIN_EXE_coracle"))
        .args(["internal", "--help"])
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands = commands.take_while(|line| !line.is_empty());
    let roles: BTreeSet<String> = commands
        .filter_map(|line| line.strip_prefix("  ")?.split(' ').next())
        .filter(|name| !["", "help"].contains(name))
        .map(str::to_owned)
        .collect();
    let dir = crates().join("coracle/src/roles");
    let mut modules = names_in(&dir);
    modules.remove("mod");
    let kebab: BTreeSet<_> = modules.iter().map(|name| name.replace('_', "-")).collect();
    assert_eq!(roles, kebab);
    for module in modules {
        let file = fs::read_to_string(dir.join(format!("{module}.rs")));
        let text = file.or_else(|_| fs::read_to_string(dir.join(&module).join("mod.rs")));
        let begin = format!("//! `coracle internal {}", module.replace('_', "-"));
        assert!(text.unwrap().starts_with(&begin), "{module}");
    }
}

#[test]
fn roles_use_no_submodules_of_each_other() {
    let roles = crates().join("coracle/src/roles");
    for file in sources(&crates().join("coracle/src")) {
        let text = fs::read_to_string(&file).unwrap();
        for role in names_in(&roles) {
            let own =
                file.starts_with(roles.join(&role)) || file == roles.join(format!("{role}.rs"));
            let path = format!("roles::{role}::");
            let used = text.split(&path).skip(1);
            let is_module = |path: &str| {
                let name = path
                    .split(|c: char| !c.is_alphanumeric() && c != '_')
                    .next();
                name.is_some_and(|name| path[name.len()..].starts_with("::"))
            };
            let used = used.filter(|path| is_module(path)).count();
            assert!(
                own || used == 0,
                "{} uses a module of {role}",
                file.display()
            );
        }
    }
}
