//! Reports of invented hosts: one where everything works, and one where nothing does.

use std::collections::BTreeMap;

use linux::probe::host::{CgroupInfo, FileSystemInfo, Kernel};
use linux::probe::subid::{IdRange, SetuidHelper, SubordinateIds};
use slurm::SlurmError;

use super::make_report;
use crate::commands::doctor::report::FindingStatus;
use crate::commands::doctor::survey::{SlurmSurvey, Survey, SurveyedDir};

fn directory(source: &'static str, path: &str, kind: &str, shared: bool) -> SurveyedDir {
    let file_system = FileSystemInfo {
        kind: kind.into(),
        shared,
        memory: kind == "tmpfs",
        free: 100 << 30,
    };
    SurveyedDir {
        source,
        path: path.into(),
        file_system: Ok(file_system),
        writable: true,
    }
}

fn probes(result: Result<&str, &str>) -> BTreeMap<&'static str, Result<String, String>> {
    let names = [
        "user-namespace",
        "process-namespace",
        "subordinate-ids",
        "fuse",
        "bridge",
    ];
    names
        .map(|name| (name, result.map(str::to_owned).map_err(str::to_owned)))
        .into()
}

fn good() -> Survey {
    let range = vec![IdRange {
        start: 100_000,
        count: 65_536,
    }];
    Survey {
        host: "node1".into(),
        user: "ada".into(),
        kernel: Kernel {
            release: "6.12.0".into(),
            version: (6, 12),
        },
        probes: probes(Ok("works")),
        sysctls: BTreeMap::from([("user.max_user_namespaces", "15000".to_owned())]),
        ranges: SubordinateIds {
            user: range.clone(),
            group: range,
        },
        newuidmap: SetuidHelper::Ready("/usr/bin/newuidmap".into()),
        newgidmap: SetuidHelper::Ready("/usr/bin/newgidmap".into()),
        cgroup: Some(CgroupInfo {
            path: "/sys/fs/cgroup/job".into(),
            controllers: vec!["cpu".into(), "memory".into()],
            delegated: true,
        }),
        hidepid: Some("invisible".into()),
        home: Some(directory("HOME", "/home/ada", "nfs", true)),
        program: Some(directory("this program", "/home/ada/bin", "nfs", true)),
        scratch: vec![directory("TMPDIR", "/local/ada", "xfs", false)],
        overlay_on_scratch: Some(Ok("mounted".into())),
        fuse_overlayfs: None,
        snapshotter_choice: None,
        slurm: SlurmSurvey {
            commands: Ok("/usr/bin/srun".into()),
            version: Some(Ok(slurm::SlurmVersion::new(26, 5))),
            controller: Some(Ok(())),
            partitions: slurm::parse_partitions("main*|up|1/1/0/2\nlong|down|0/0/4/4\n"),
            job: Some(7),
        },
    }
}

fn bad() -> Survey {
    let missing = vec!["srun", "scontrol"];
    Survey {
        host: "login".into(),
        kernel: Kernel {
            release: "4.18.0-553.el8".into(),
            version: (4, 18),
        },
        probes: probes(Err("unshare: Operation not permitted (os error 1)")),
        sysctls: BTreeMap::from([("user.max_user_namespaces", "0".to_owned())]),
        ranges: SubordinateIds::default(),
        newuidmap: SetuidHelper::Missing,
        cgroup: None,
        hidepid: None,
        home: None,
        scratch: vec![SurveyedDir {
            writable: false,
            ..directory("/tmp", "/tmp", "tmpfs", false)
        }],
        overlay_on_scratch: None,
        fuse_overlayfs: None,
        snapshotter_choice: None,
        slurm: SlurmSurvey {
            commands: Err(SlurmError::NotInstalled { missing }),
            version: None,
            controller: None,
            partitions: Vec::new(),
            job: None,
        },
        ..good()
    }
}

fn status_of(survey: &Survey, id: &str) -> String {
    let report = make_report(survey);
    let finding = report.findings.iter().find(|finding| finding.id == id);
    finding.map_or_else(String::new, |finding| {
        format!(
            "{:?}: {} → {}",
            finding.status,
            finding.found,
            finding.next.as_deref().unwrap_or("-")
        )
    })
}

#[test]
fn good_host_report() {
    let report = make_report(&good());
    assert!(report.pods_can_run && report.slurm_usable);
    insta::assert_snapshot!(report.render(false, false));
}

#[test]
fn verbose_report_shows_everything() {
    let report = make_report(&good());
    insta::assert_snapshot!(report.render(true, false));
}

#[test]
fn bad_host_report() {
    let report = make_report(&bad());
    assert!(!report.pods_can_run && !report.slurm_usable);
    insta::assert_snapshot!(report.render(false, false));
}

/// A finding of level `ok` must not say that something is absent.
#[test]
fn nothing_is_ok_that_is_absent() {
    for survey in [good(), bad()] {
        for finding in make_report(&survey).findings {
            if finding.status != FindingStatus::Ok {
                continue;
            }
            for word in ["not ", "no ", "none", "n't", "unknown", "missing"] {
                let found = &finding.found;
                assert!(!found.contains(word), "{}: {found}", finding.id);
            }
        }
    }
}

#[test]
fn json_schema_is_stable() {
    let mut report = make_report(&good());
    report.coracle = "0.0.0".into();
    report.findings.truncate(2);
    insta::assert_json_snapshot!(report);
}

#[test]
fn pods_can_run_without_slurm() {
    let report = make_report(&Survey {
        slurm: bad().slurm,
        ..good()
    });
    assert!(report.pods_can_run && !report.slurm_usable);
    assert!(
        report
            .render(false, false)
            .starts_with("node1: pods can run here, but `coracle run` needs Slurm")
    );
}

#[test]
fn blocking_sysctl_is_named() {
    let with = |name: &'static str, value: &str| {
        let sysctls = BTreeMap::from([(name, value.to_owned())]);
        status_of(&Survey { sysctls, ..bad() }, "user-namespaces")
    };
    let cases = [
        with("user.max_user_namespaces", "0"),
        with("kernel.unprivileged_userns_clone", "0"),
        with("kernel.apparmor_restrict_unprivileged_userns", "1"),
        with("user.max_user_namespaces", "9999"),
    ];
    insta::assert_snapshot!(cases.join("\n"));
}

#[test]
fn missing_part_of_subordinate_ids_is_named() {
    let mut probes = good().probes;
    probes.insert(
        "subordinate-ids",
        Err("newuidmap: open of uid_map failed".into()),
    );
    let without = |change: fn(&mut Survey)| {
        let mut survey = Survey {
            probes: probes.clone(),
            ..good()
        };
        change(&mut survey);
        status_of(&survey, "subordinate-ids")
    };
    let cases = [
        without(|survey| survey.ranges.user.clear()),
        without(|survey| survey.ranges.group.clear()),
        without(|survey| survey.newgidmap = SetuidHelper::Missing),
        without(|survey| survey.newuidmap = SetuidHelper::Unprivileged("/opt/newuidmap".into())),
        without(|_| ()),
    ];
    insta::assert_snapshot!(cases.join("\n"));
}

#[test]
fn scratch_in_memory_or_on_network_is_degraded() {
    let on = |kind: &str, shared| {
        let scratch = vec![directory("/tmp", "/tmp", kind, shared)];
        status_of(&Survey { scratch, ..good() }, "local-scratch")
    };
    assert!(on("tmpfs", false).starts_with("Degraded"));
    assert!(on("nfs", true).starts_with("Degraded"));
    assert!(on("ext4", false).starts_with("Ok"));
}
