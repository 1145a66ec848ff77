//! Containers that try to run or modify the program that starts them: the user's own file on the host.

use e2e::{
    BUSYBOX, Lab, TestCluster, WAIT_FOR_SIGTERM, container_status, merged, pod, script_container,
    wait_until,
};
use serde_json::json;

const DIR: &str = "own";
const PROGRAM: &str = "/home/user1/own/coracle";
const RELEASES: &str = "--kubernetes=/opt/coracle/lib/coracle/kubernetes";
const REFUSED: &str = "containers cannot run the program that starts them";

/// The file's metadata, including its ctime, which every modification changes.
fn metadata(lab: &Lab) -> String {
    let stat = format!("stat --format='%i %a %u %g %s %Y %Z' {PROGRAM}");
    lab.root("node1", &stat).succeeded().stdout
}

/// The executables of the sandboxes on node1.
fn programs_of_sandboxes(lab: &Lab) -> Vec<String> {
    let all = lab.processes("node1").into_iter();
    let sandboxes = all.filter(|process| process.args.contains("internal sandbox"));
    sandboxes
        .map(|sandbox| {
            let link = format!("readlink /proc/{}/exe", sandbox.pid);
            lab.root("node1", &link).stdout
        })
        .collect()
}

/// Scripts and links whose interpreter is /proc/self/exe.
const INTERPRETED: &str = r#"
printf '#!/proc/self/exe\n' > /script; printf '#!/script\n' > /second; ln -s /proc/self/exe /link
chmod 755 /script /second; touch /ready
"#;

/// Tries to modify every executable that it can see, until `/v/end` exists.
const CHANGE: &str = r#"
until test -e /v/end; do
  for exe in /proc/[0-9]*/exe; do
    case $(readlink $exe) in /bin/busybox|'') ;; *) echo "sees $(readlink $exe)"; chmod 777 $exe; touch $exe ;; esac
  done 2> /dev/null
done
"#;

#[test]
fn containers_cannot_run_or_modify_coracle() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let copy = format!("mkdir -p {DIR} && cp /opt/coracle/bin/coracle {PROGRAM}");
    lab.sh(&copy).run().succeeded();
    let before = metadata(&lab);
    let args = ["srun", "--overlap", "-N1", PROGRAM, "run", RELEASES];
    let mut cluster = TestCluster::start_as(&lab, "user1", &args);

    // If the hub started, it would wait for input, and its executable could be modified in the meantime.
    let own = json!({"name": "own", "image": BUSYBOX, "stdin": true, "command": ["/proc/self/exe", "internal", "hub"]});
    let volume = json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]});
    let privileged = json!({"securityContext": {"privileged": true}});
    let change = script_container("change", CHANGE, merged(volume.clone(), privileged));
    let shared = json!({"shareProcessNamespace": true, "volumes": [{"name": "v", "emptyDir": {}}]});
    let mut step = pod(
        "step",
        json!({}),
        &[script_container("main", WAIT_FOR_SIGTERM, json!({}))],
    );
    step["metadata"]["annotations"] = json!({"coracle.dev/launcher": "step"});
    let interpreted = format!("{INTERPRETED}\n{WAIT_FOR_SIGTERM}");
    cluster.create_objects(&[
        pod(
            "shared",
            shared,
            &[
                own,
                change,
                script_container("end", WAIT_FOR_SIGTERM, volume),
            ],
        ),
        pod(
            "exec",
            json!({}),
            &[script_container("main", &interpreted, json!({}))],
        ),
        step,
    ]);
    let shared = cluster.pod_until("shared", "refused", |pod| {
        pod["status"]["containerStatuses"].is_array()
            && container_status(pod, "own")["state"]
                .to_string()
                .contains(REFUSED)
    });
    let state = container_status(&shared, "own")["state"].to_string();
    assert!(state.contains("StartError"), "{state}");

    cluster.wait_for("exec", "condition=Ready");
    let ready = || cluster.try_shell("kubectl exec exec -- test -e /ready").0 == 0;
    wait_until(10, "the scripts exist", ready);
    for program in ["/proc/self/exe", "/link", "/script", "/second"] {
        let (code, output) =
            cluster.try_shell(&format!("kubectl exec exec -- {program} --version"));
        assert!(code != 0 && output.contains(REFUSED), "{program}: {output}");
    }
    cluster.wait_for("step", "condition=Ready");
    // Processes start while the other container modifies executables.
    for _ in 0..5 {
        cluster.shell("kubectl exec shared --container=end -- true");
    }
    let programs = programs_of_sandboxes(&lab);
    let is_copy = |program: &String| program.starts_with("/memfd:coracle");
    assert!(
        programs.len() >= 6 && programs.iter().all(is_copy),
        "{programs:?}"
    );

    cluster.shell("kubectl exec shared --container=end -- touch /v/end");
    cluster.pod_until("shared", "ended", |pod| {
        !container_status(pod, "change")["state"]["terminated"].is_null()
    });
    assert_eq!(cluster.logs("shared", "change"), "");
    cluster.exit(0);
    assert_eq!(metadata(&lab), before);
    lab.remove(DIR);
    lab.assert_nothing_left();
}
