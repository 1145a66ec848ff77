//! Image pulls of pods, and the pod's status when a pull fails.

use std::time::Duration;

use e2e::{
    EMPTY_LAYER, Lab, REGISTRY, TestCluster, container_status, echo_config, eventually, merged,
};
use serde_json::{Value, json};

const ONE: &[&str] = &["srun", "-N1", "coracle", "run"];

fn pod(name: &str, image: &str, more: Value) -> Value {
    let spec = json!({"restartPolicy": "Never", "containers": [{"name": "main", "image": image}]});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": merged(spec, more)})
}

fn with_policy(name: &str, image: &str, policy: &str) -> Value {
    let mut pod = pod(name, image, json!({}));
    pod["spec"]["containers"][0]["imagePullPolicy"] = json!(policy);
    pod
}

/// Waits until each of these pods is waiting for one of its reasons, with this text in the message.
#[track_caller]
fn wait_for_waiting_states(cluster: &mut TestCluster, expected: &[(&str, &[&str], &str)]) {
    let mut failures = Vec::new();
    for (name, reasons, text) in expected {
        let mut last = Value::Null;
        let seen = eventually(Duration::from_secs(30), || {
            last = cluster.pod(name)["status"]["containerStatuses"][0]["state"]["waiting"].clone();
            let reason = last["reason"].as_str().unwrap_or_default();
            let message = last["message"].as_str().unwrap_or_default();
            (reasons.contains(&reason) && message.contains(text)).then_some(())
        });
        if seen.is_none() {
            failures.push(format!("{name}: not {reasons:?} with {text:?}: {last}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The second reason follows the first at once, so polling may find either.
const PULL_FAILED: &[&str] = &["ErrImagePull", "ImagePullBackOff"];

#[test]
fn images_are_pulled_with_pull_secrets() {
    let lab = Lab::acquire();
    let registry = lab.start_registry();
    let image = registry.push("team/app", echo_config("hello"), EMPTY_LAYER);
    let mut cluster = TestCluster::start_as(&lab, "user1", ONE);
    for (name, password) in [("right", "right"), ("wrong", "guess")] {
        cluster.shell(&format!(
            "kubectl create secret docker-registry {name} --docker-server={REGISTRY} --docker-username=user --docker-password={password}"
        ));
    }
    let secret = |name: &str| json!({"imagePullSecrets": [{"name": name}]});
    cluster.create_objects(&[
        pod("anonymous", &image, json!({})),
        pod("wrong-secret", &image, secret("wrong")),
        pod("no-secret", &image, secret("absent")),
        pod(
            "absent",
            &format!("{REGISTRY}/team/absent:1"),
            secret("right"),
        ),
        pod("no-tag", &format!("{REGISTRY}/team/app:2"), secret("right")),
        pod("unreachable", "login:5999/x:1", json!({})),
        with_policy("never", "coracle.test/absent:1", "Never"),
        pod("not-a-name", "Not A//Name", json!({})),
    ]);
    wait_for_waiting_states(
        &mut cluster,
        &[
            ("anonymous", PULL_FAILED, "team/app:1"),
            ("wrong-secret", PULL_FAILED, "team/app:1"),
            ("no-secret", PULL_FAILED, "team/app:1"),
            ("absent", PULL_FAILED, "team/absent:1"),
            ("no-tag", PULL_FAILED, "team/app:2"),
            (
                "unreachable",
                &["RegistryUnavailable", "ErrImagePull", "ImagePullBackOff"],
                "login:5999/x:1",
            ),
            (
                "never",
                &["ErrImageNeverPull"],
                "Container image \"coracle.test/absent:1\" is not present with pull policy of Never",
            ),
            ("not-a-name", &["InvalidImageName"], "Not A//Name"),
        ],
    );
    wait_for_waiting_states(
        &mut cluster,
        &[("absent", &["ImagePullBackOff"], "Back-off pulling image")],
    );
    for expected in [
        "Normal Pulling Pulling image",
        "Warning Failed Failed to pull image",
        "Normal BackOff Back-off pulling image",
    ] {
        cluster.wait_for_event("absent", expected);
    }
    assert_eq!(cluster.pod("absent")["status"]["phase"], "Pending");

    cluster.create_objects(&[pod("right-secret", &image, secret("right"))]);
    let ended = cluster.wait_for_phase("right-secret", "Succeeded");
    assert_eq!(cluster.logs("right-secret", "main"), "hello");
    let status = container_status(&ended, "main");
    assert_eq!(status["image"], image);
    assert!(
        status["imageID"]
            .as_str()
            .unwrap_or_default()
            .contains("sha256:"),
        "{status:#}"
    );
    cluster.wait_for_event("right-secret", "Normal Pulled Successfully pulled image");

    // A failed pull is retried, and finds the image that has been pushed since.
    registry.push("team/absent", echo_config("at last"), EMPTY_LAYER);
    cluster.wait_for_phase("absent", "Succeeded");
    // The image is now in the store, but only for pods with credentials for it.
    let absent = format!("{REGISTRY}/team/absent:1");
    let mut present = with_policy("present", &absent, "IfNotPresent");
    present["spec"]["imagePullSecrets"] = json!([{"name": "right"}]);
    cluster.create_objects(&[
        present,
        with_policy("without", &absent, "IfNotPresent"),
        with_policy("hidden", &absent, "Never"),
        with_policy("always", &absent, "Always"),
    ]);
    cluster.wait_for_phase("present", "Succeeded");
    cluster.wait_for_event("present", "already present on machine");
    wait_for_waiting_states(
        &mut cluster,
        &[
            ("without", PULL_FAILED, "team/absent:1"),
            (
                "hidden",
                &["ErrImageNeverPull"],
                "is not present with pull policy of Never",
            ),
            ("always", PULL_FAILED, "team/absent:1"),
        ],
    );
    cluster.exit(0);
    drop(registry);
    lab.sh("coracle image rm login:5000/team/app:1 login:5000/team/absent:1")
        .run()
        .succeeded();
    lab.assert_nothing_left();
}

#[test]
fn hostile_images_are_rejected() {
    let lab = Lab::acquire();
    let hostile = [
        (
            "climbing",
            "touch x && tar --absolute-names --transform='s,^x,../../escaped,' --create x",
            "leaves the layer",
        ),
        (
            "linking",
            "touch a && ln a b && tar --absolute-names --transform='flags=h;s,^a,../../../../etc/passwd,' --create a b",
            "the target's name leaves the layer",
        ),
        (
            "rubbish",
            "echo this is no archive",
            "cannot read the layer",
        ),
    ];
    for (name, layer, _) in &hostile {
        lab.load_image(
            &format!("coracle.test/{name}:1"),
            echo_config("never"),
            layer,
        );
    }
    // Absolute paths and links are resolved inside of the container's root.
    let inside = "ln -s /outside link && mkdir dir && echo written > dir/file && tar --transform='s,^dir,link,' --create link dir/file";
    lab.load_image(
        "coracle.test/inside:1",
        json!({"Env": ["PATH=/bin"], "Cmd": ["cat", "/outside/file"]}),
        inside,
    );
    let mut cluster = TestCluster::start_as(&lab, "user1", ONE);
    let mut pods: Vec<Value> = hostile
        .iter()
        .map(|(name, ..)| pod(name, &format!("coracle.test/{name}:1"), json!({})))
        .collect();
    pods.push(pod("inside", "coracle.test/inside:1", json!({})));
    cluster.create_objects(&pods);
    let reasons = &[
        "ErrImagePull",
        "ImagePullBackOff",
        "ImageInspectError",
        "CreateContainerError",
    ];
    let expected: Vec<(&str, &[&str], &str)> = hostile
        .iter()
        .map(|(name, _, text)| (*name, &reasons[..], *text))
        .collect();
    wait_for_waiting_states(&mut cluster, &expected);
    cluster.wait_for_phase("inside", "Succeeded");
    assert_eq!(cluster.logs("inside", "main"), "written");
    for path in ["/tmp/escaped", "/outside", "/escaped"] {
        assert_eq!(
            lab.root("node1", &format!("ls -d {path} 2> /dev/null; true"))
                .stdout,
            ""
        );
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn images_of_unusual_shapes_run() {
    let lab = Lab::acquire();
    // Without /etc and /tmp, and with an opaque directory.
    lab.load_image(
        "coracle.test/bare:1",
        json!({"Entrypoint": ["/bin/sh", "-c", "ls / /opt; cat /etc/hostname; id -u; pwd"], "WorkingDir": "/new/place"}),
        "mkdir opt && touch .wh.tmp opt/.wh..wh..opq opt/own && tar --create .wh.tmp opt/.wh..wh..opq opt/own",
    );
    lab.load_image(
        "coracle.test/relative:1",
        json!({"Cmd": ["./run", "it"], "WorkingDir": "/app", "User": "1234:44", "Env": ["PATH=/bin", "EMPTY=", "TWO=a=b"]}),
        r#"mkdir app && printf '#!/bin/sh\necho "$1 $EMPTY $TWO $(id -u):$(id -g) $HOME"\n' > app/run && chmod 755 app/run && tar --create app"#,
    );
    lab.load_image("coracle.test/nothing:1", json!({}), EMPTY_LAYER);
    lab.load_image(
        "coracle.test/user:1",
        json!({"Env": ["PATH=/bin"], "Cmd": ["id"], "User": "70000"}),
        EMPTY_LAYER,
    );
    let mut cluster = TestCluster::start_as(&lab, "user1", ONE);
    cluster.create_objects(&[
        pod(
            "bare",
            "coracle.test/bare:1",
            json!({"automountServiceAccountToken": false}),
        ),
        pod("relative", "coracle.test/relative:1", json!({})),
        pod("nothing", "coracle.test/nothing:1", json!({})),
        pod("user", "coracle.test/user:1", json!({})),
    ]);
    cluster.wait_for_phase("bare", "Succeeded");
    assert_eq!(
        cluster.logs("bare", "main"),
        "/:\nbin\ndev\netc\nnew\nopt\nproc\nsys\n\n/opt:\nown\nbare\n0\n/new/place"
    );
    cluster.wait_for_phase("relative", "Succeeded");
    assert_eq!(
        cluster.logs("relative", "main"),
        "it  a=b 1234:44 /home/app"
    );
    wait_for_waiting_states(
        &mut cluster,
        &[("nothing", &["CreateContainerError"], "no command specified")],
    );
    let user = cluster.wait_for_phase("user", "Failed");
    let ended = container_status(&user, "main")["state"]["terminated"]["message"].to_string();
    assert!(
        ended.contains("70000") && ended.contains("must be among your subordinate ids"),
        "{user:#}"
    );
    cluster.exit(0);
    lab.assert_nothing_left();
}
