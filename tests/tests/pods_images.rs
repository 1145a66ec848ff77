//! Image pulls of pods, and the pod's status when a pull fails.

use std::time::Duration;

use e2e::{Cluster, EMPTY_LAYER, Lab, REGISTRY, container, eventually, merged, says};
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
fn wait_with(cluster: &mut Cluster, expected: &[(&str, &[&str], &str)]) {
    let mut wrong = Vec::new();
    for (name, reasons, words) in expected {
        let mut last = Value::Null;
        let seen = eventually(Duration::from_secs(30), || {
            last = cluster.pod(name)["status"]["containerStatuses"][0]["state"]["waiting"].clone();
            let reason = last["reason"].as_str().unwrap_or_default();
            let message = last["message"].as_str().unwrap_or_default();
            (reasons.contains(&reason) && message.contains(words)).then_some(())
        });
        if seen.is_none() {
            wrong.push(format!("{name}: not {reasons:?} with {words:?}: {last}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Either may be seen: the second follows the first at once.
const PULL: &[&str] = &["ErrImagePull", "ImagePullBackOff"];

#[test]
fn images_are_pulled_with_pull_secrets() {
    let lab = Lab::ready();
    let registry = lab.registry();
    let image = registry.push("team/app", says("hello"), EMPTY_LAYER);
    let mut cluster = Cluster::start_as(&lab, "user1", ONE);
    for (name, password) in [("right", "right"), ("wrong", "guess")] {
        cluster.ask(&format!(
            "kubectl create secret docker-registry {name} --docker-server={REGISTRY} --docker-username=user --docker-password={password}"
        ));
    }
    let secret = |name: &str| json!({"imagePullSecrets": [{"name": name}]});
    cluster.create_objects(&[
        pod("nobody", &image, json!({})),
        pod("stranger", &image, secret("wrong")),
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
    wait_with(
        &mut cluster,
        &[
            ("nobody", PULL, "team/app:1"),
            ("stranger", PULL, "team/app:1"),
            ("no-secret", PULL, "team/app:1"),
            ("absent", PULL, "team/absent:1"),
            ("no-tag", PULL, "team/app:2"),
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
    wait_with(
        &mut cluster,
        &[("absent", &["ImagePullBackOff"], "Back-off pulling image")],
    );
    for words in [
        "Normal Pulling Pulling image",
        "Warning Failed Failed to pull image",
        "Normal BackOff Back-off pulling image",
    ] {
        cluster.event("absent", words);
    }
    assert_eq!(cluster.pod("absent")["status"]["phase"], "Pending");

    cluster.create_objects(&[pod("friend", &image, secret("right"))]);
    let ended = cluster.in_phase("friend", "Succeeded");
    assert_eq!(cluster.logs("friend", "main"), "hello");
    let status = container(&ended, "main");
    assert_eq!(status["image"], image);
    assert!(
        status["imageID"]
            .as_str()
            .unwrap_or_default()
            .contains("sha256:"),
        "{status:#}"
    );
    cluster.event("friend", "Normal Pulled Successfully pulled image");

    // A failed pull is retried, and finds the image that has been pushed since.
    registry.push("team/absent", says("at last"), EMPTY_LAYER);
    cluster.in_phase("absent", "Succeeded");
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
    cluster.in_phase("present", "Succeeded");
    cluster.event("present", "already present on machine");
    wait_with(
        &mut cluster,
        &[
            ("without", PULL, "team/absent:1"),
            (
                "hidden",
                &["ErrImageNeverPull"],
                "is not present with pull policy of Never",
            ),
            ("always", PULL, "team/absent:1"),
        ],
    );
    cluster.exit(0);
    drop(registry);
    lab.sh("coracle image rm login:5000/team/app:1 login:5000/team/absent:1")
        .run()
        .succeeded();
    lab.nothing_left();
}

#[test]
fn hostile_images_are_rejected() {
    let lab = Lab::ready();
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
        lab.load_image(&format!("coracle.test/{name}:1"), says("never"), layer);
    }
    // Absolute paths and links are resolved inside of the container's root.
    let inside = "ln -s /outside link && mkdir dir && echo written > dir/file && tar --transform='s,^dir,link,' --create link dir/file";
    lab.load_image(
        "coracle.test/inside:1",
        json!({"Env": ["PATH=/bin"], "Cmd": ["cat", "/outside/file"]}),
        inside,
    );
    let mut cluster = Cluster::start_as(&lab, "user1", ONE);
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
        .map(|(name, _, words)| (*name, &reasons[..], *words))
        .collect();
    wait_with(&mut cluster, &expected);
    cluster.in_phase("inside", "Succeeded");
    assert_eq!(cluster.logs("inside", "main"), "written");
    for path in ["/tmp/escaped", "/outside", "/escaped"] {
        assert_eq!(
            lab.root("node1", &format!("ls -d {path} 2> /dev/null; true"))
                .stdout,
            ""
        );
    }
    cluster.exit(0);
    lab.nothing_left();
}

#[test]
fn images_of_unusual_shapes_run() {
    let lab = Lab::ready();
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
    let mut cluster = Cluster::start_as(&lab, "user1", ONE);
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
    cluster.in_phase("bare", "Succeeded");
    assert_eq!(
        cluster.logs("bare", "main"),
        "/:\nbin\ndev\netc\nnew\nopt\nproc\nsys\n\n/opt:\nown\nbare\n0\n/new/place"
    );
    cluster.in_phase("relative", "Succeeded");
    assert_eq!(
        cluster.logs("relative", "main"),
        "it  a=b 1234:44 /home/app"
    );
    wait_with(
        &mut cluster,
        &[("nothing", &["CreateContainerError"], "no command specified")],
    );
    let user = cluster.in_phase("user", "Failed");
    let ended = container(&user, "main")["state"]["terminated"]["message"].to_string();
    assert!(
        ended.contains("70000") && ended.contains("not among the ids"),
        "{user:#}"
    );
    cluster.exit(0);
    lab.nothing_left();
}
