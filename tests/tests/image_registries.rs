//! Registries of all kinds, their credentials, and image pulls of pods.

use e2e::store::{DIR, acquire_lab, image, listed, shell};
use e2e::{
    EMPTY_LAYER, ImageFormat, Lab, MIRROR, REGISTRY, Registry, TOKENS, TestCluster,
    container_status, echo_config, image_pod, wait_for_pull_error, wait_until,
};
use serde_json::{Value, json};
use std::time::Duration;

/// A credential helper that knows the registry's password, and logs its requests.
const HELPER: &str = r#"#!/bin/sh
read -r server || true
echo "$1 $server" >> "$HOME/images-test/requests"
case $server in
  login:5000) echo '{"ServerURL":"login:5000","Username":"user","Secret":"right"}' ;;
  *) echo 'credentials not found in native keychain'; exit 1 ;;
esac
"#;

#[track_caller]
fn write_helper(lab: &Lab) {
    lab.write(&format!("{DIR}/bin/docker-credential-lab"), HELPER);
    lab.sh(&format!("chmod 755 ~/{DIR}/bin/*"))
        .run()
        .succeeded();
}

#[test]
fn registries_are_used_as_configured() {
    let lab = acquire_lab();
    let registry = lab.start_registry();
    let app = registry.push_as(
        "team/app",
        "1",
        ImageFormat::Docker,
        echo_config("app"),
        EMPTY_LAYER,
    );
    registry.push(
        "team/bad",
        echo_config("bad"),
        "echo content > file && tar --create file",
    );
    let mirror = lab.start_mirror();
    let tool = mirror.push_as(
        "hub/library/tool",
        "1",
        ImageFormat::Zstd,
        echo_config("tool"),
        EMPTY_LAYER,
    );

    // A registry without TLS that is not configured as insecure.
    lab.write_registries_config("");
    let pull = format!("pull {app}");
    image(&lab, &pull).run().exited_with(74).stderr_has(&[
        "login:5000",
        "hint: if this registry has no TLS, set `insecure = true`",
    ]);
    lab.write_registries_config(&format!("[registry.\"{REGISTRY}\"]\ninsecure = true\n"));
    image(&lab, &pull).run().exited_with(74).stderr_has(&[
        "login:5000/team/app:1: pull access denied",
        "hint: ",
        "~/.docker/config.json",
    ]);

    // With Docker's configuration file.
    let auth = |password: &str| json!({"auths": {REGISTRY: {"auth": password}}}).to_string();
    lab.write(".docker/config.json", &auth("dXNlcjpndWVzcw=="));
    image(&lab, &pull)
        .run()
        .exited_with(74)
        .stderr_has(&["pull access denied"]);
    lab.write(".docker/config.json", "{\"auths\": [");
    image(&lab, &pull)
        .run()
        .exited_with(74)
        .stderr_has(&[".docker/config.json"]);
    lab.write(".docker/config.json", &auth("dXNlcjpyaWdodA=="));
    let pulled = image(&lab, &pull).run().succeeded();
    let id = pulled.stdout.trim().to_owned();
    assert!(id.starts_with("login:5000/team/app@sha256:"), "{pulled}");
    let pulled = pulled.stderr_has(&[
        ": downloading ",
        "checksum good",
        "pulled login:5000/team/app:1 (",
    ]);
    assert!(!pulled.stderr.contains('\u{1b}'), "{pulled}");
    // Blobs in the store are not downloaded again.
    let before = registry.successful_requests("GET /v2/team/app/blobs/");
    assert_eq!(before, 3);
    image(&lab, &pull).run().succeeded().stdout_is(&id);
    image(&lab, &format!("pull {id}"))
        .run()
        .succeeded()
        .stdout_is(&id);
    assert_eq!(
        registry.successful_requests("GET /v2/team/app/blobs/"),
        before
    );
    // On a terminal, progress bars are shown.
    let bars = format!("script -qec 'stty cols 120; coracle image {pull} --store bars' /dev/null");
    let bars = shell(&lab, &bars).run().succeeded();
    assert!(
        bars.stdout.contains('█') && bars.stdout.contains('\u{1b}'),
        "{bars}"
    );

    // With a credential helper.
    lab.remove(".docker");
    write_helper(&lab);
    for (number, config) in [
        json!({"credHelpers": {REGISTRY: "lab"}}),
        json!({"credsStore": "lab", "auths": {REGISTRY: {}}}),
    ]
    .iter()
    .enumerate()
    {
        lab.write(&format!("{DIR}/docker/config.json"), &config.to_string());
        let pull = format!(
            "PATH=$PWD/bin:$PATH DOCKER_CONFIG=$PWD/docker coracle image {pull} --store with-helper-{number}"
        );
        shell(&lab, &pull).run().succeeded().stdout_is(&id);
    }
    shell(&lab, "cat requests")
        .run()
        .stdout_is("get login:5000\nget login:5000");
    for (name, expected) in [("absent", "No such file"), ("false", "exit")] {
        shell(&lab, "ln -sf /bin/false bin/docker-credential-false")
            .run()
            .succeeded();
        let config = json!({"credHelpers": {REGISTRY: name}}).to_string();
        lab.write(&format!("{DIR}/docker/config.json"), &config);
        let pull = format!(
            "PATH=$PWD/bin:$PATH DOCKER_CONFIG=$PWD/docker coracle image {pull} --store with-broken-helper"
        );
        let program = format!("docker-credential-{name}");
        shell(&lab, &pull)
            .run()
            .exited_with(74)
            .stderr_has(&[&program, expected]);
    }

    // Content with a wrong digest.
    lab.write(".docker/config.json", &auth("dXNlcjpyaWdodA=="));
    registry.corrupt_layer("team/bad", "1");
    image(&lab, &format!("pull {REGISTRY}/team/bad:1"))
        .run()
        .exited_with(74)
        .stderr_has(&["login:5000 sent sha256:", " instead of sha256:"]);
    let other = format!("{REGISTRY}/team/app@sha256:{}", "0".repeat(64));
    image(&lab, &format!("pull {other}"))
        .run()
        .exited_with(74)
        .stderr_has(&[": not found"]);
    assert_eq!(listed(&lab, "store"), [app.as_str(), &id]);

    // A certificate of an unknown CA; then with the CA configured, and with verification disabled.
    let pull = format!("pull {tool}");
    image(&lab, &pull).run().exited_with(74).stderr_has(&[
        "certificate",
        "hint: ",
        "`ca = \"FILE\"`",
    ]);
    for (number, rule) in ["ca = \"/home/user1/mirror/ca.pem\"", "insecure = true"]
        .iter()
        .enumerate()
    {
        lab.write_registries_config(&format!("[registry.\"{MIRROR}\"]\n{rule}\n"));
        image(&lab, &format!("{pull} --store trusted-{number}"))
            .run()
            .succeeded();
    }
    // Mirrors for a registry that cannot be reached. The first mirror does not work either.
    lab.write_registries_config(&format!(
        "[registry.\"docker.io\"]\nmirrors = [\"login:5999\", \"https://{MIRROR}/hub\"]\n\
         [registry.\"{MIRROR}\"]\nca = \"/home/user1/mirror/ca.pem\"\n"
    ));
    image(&lab, "pull tool:1")
        .run()
        .succeeded()
        .stderr_has(&[
            "skipping a mirror",
            "login:5999",
            "pulled docker.io/library/tool:1",
        ])
        .stdout_has(&["docker.io/library/tool@sha256:"]);
    token_authentication_and_resumed_downloads(&lab, &registry);
    drop((registry, mirror));
    lab.remove(".docker");
    lab.remove(DIR);
    lab.assert_nothing_left();
}

/// A registry with token authentication, and a pull that is killed in the middle of a layer.
#[track_caller]
fn token_authentication_and_resumed_downloads(lab: &Lab, registry: &Registry<'_>) {
    let noise = "head -c 12M /dev/urandom > noise && tar --create noise";
    registry.push("team/large", echo_config("large"), noise);
    let (_, manifest) = registry.manifest("team/large", "1");
    let layer = &manifest["layers"][1];
    let size = layer["size"].as_u64().expect("a size");
    let digest = layer["digest"].as_str().expect("a digest");
    let tokens = lab.start_token_registry(registry);
    lab.write_registries_config(&format!("[registry.\"{TOKENS}\"]\ninsecure = true\n"));
    let large = format!("{TOKENS}/team/large:1");
    let pull = format!("pull {large} --store tokens");

    // Without credentials, and with a wrong password.
    lab.remove(".docker");
    let denied = format!("{large}: pull access denied");
    image(lab, &pull)
        .run()
        .exited_with(74)
        .stderr_has(&[&denied]);
    let auth = |password: &str| json!({"auths": {TOKENS: {"auth": password}}}).to_string();
    lab.write(".docker/config.json", &auth("dXNlcjpndWVzcw=="));
    image(lab, &pull)
        .run()
        .exited_with(74)
        .stderr_has(&[&denied]);
    lab.write(".docker/config.json", &auth("dXNlcjpyaWdodA=="));

    tokens.stall();
    let killed = image(lab, &pull).start();
    let half = size / 2;
    let half_arrived = format!("stat --format=%s tokens/partial/* | grep -x {half}");
    wait_until(45, "half of the layer has arrived", || {
        shell(lab, &half_arrived).run().code == 0
    });
    let args = format!("coracle image pull {large}");
    for process in lab.processes_of("login", "user1") {
        if process.args.starts_with(&args) {
            lab.kill("login", "KILL", &process);
        }
    }
    killed.wait(Duration::from_secs(30)).exited_with(137);
    tokens.resume();

    // The next pull resumes the download, and needs one token for all of its requests.
    let before = tokens.requests().lines().count();
    image(lab, &pull).run().succeeded();
    assert_eq!(listed(lab, "tokens"), [large]);
    let requests = tokens.requests();
    let token = "GET /token?service=lab&scope=repository%3Ateam%2Flarge%3Apull - 200";
    let issued = requests.lines().skip(before).filter(|line| *line == token);
    assert_eq!(issued.count(), 1, "{requests}");
    let blob = format!("GET /v2/team/large/blobs/{digest}");
    let downloads: Vec<_> = requests
        .lines()
        .filter_map(|line| line.strip_prefix(&blob))
        .collect();
    let rest = format!(" bytes={half}- 206");
    assert_eq!(downloads, [" - 200", &rest], "{requests}");
}

#[test]
fn pods_pull_images_of_all_kinds_only_once() {
    let lab = acquire_lab();
    let registry = lab.start_registry();
    let mirror = lab.start_mirror();
    write_helper(&lab);
    lab.write(
        ".docker/config.json",
        &json!({"credHelpers": {REGISTRY: "lab"}}).to_string(),
    );
    lab.write_registries_config(&format!(
        "[registry.\"{REGISTRY}\"]\ninsecure = true\n\
         [registry.\"docker.io\"]\nmirrors = [\"https://{MIRROR}/hub\"]\n\
         [registry.\"{MIRROR}\"]\nca = \"/home/user1/mirror/ca.pem\"\n"
    ));
    // The first entry is for another architecture.
    registry.push_as(
        "team/multi",
        "foreign",
        ImageFormat::Plain,
        echo_config("foreign"),
        EMPTY_LAYER,
    );
    registry.push_as(
        "team/multi",
        "own",
        ImageFormat::Zstd,
        echo_config("own"),
        EMPTY_LAYER,
    );
    let multi = registry.push_index("team/multi", "1", &[("arm64", "foreign"), ("amd64", "own")]);
    let foreign = registry.push_index(
        "team/multi",
        "2",
        &[("arm64", "foreign"), ("s390x", "foreign")],
    );
    let zstd = registry.push_as(
        "team/zstd",
        "1",
        ImageFormat::Zstd,
        echo_config("zstd"),
        EMPTY_LAYER,
    );
    let docker = registry.push_as(
        "team/docker",
        "1",
        ImageFormat::Docker,
        echo_config("docker"),
        EMPTY_LAYER,
    );
    let bad = registry.push(
        "team/bad",
        echo_config("bad"),
        "echo content > file && tar --create file",
    );
    registry.corrupt_layer("team/bad", "1");
    mirror.push("hub/library/tool", echo_config("tool"), EMPTY_LAYER);
    let moving = registry.push("team/moving", echo_config("old"), EMPTY_LAYER);
    let noise = "head -c 12M /dev/urandom > noise && tar --create noise";
    let many = registry.push("team/many", echo_config("many"), noise);
    // Export and import.
    lab.load_image("coracle.test/first:1", echo_config("again"), EMPTY_LAYER);
    lab.sh("set -o pipefail; coracle image save coracle.test/first:1 | coracle image load --name coracle.test/again:1")
        .run()
        .succeeded();

    let path = format!("/home/user1/{DIR}/bin:/opt/coracle/bin:/usr/bin:/bin:/usr/sbin:/sbin");
    let path_variable = format!("PATH={path}");
    let gc = "CORACLE_IMAGE_GC=high=0,low=0,age=60m,every=1s";
    let args = ["env", &path_variable, gc, "srun", "-N2", "coracle", "run"];
    let mut cluster = TestCluster::start_as(&lab, "user1", &args);
    let (index, list) = registry.manifest("team/multi", "1");
    let pinned = format!(
        "{REGISTRY}/team/multi@{}",
        list["manifests"][1]["digest"].as_str().expect("a digest")
    );
    let named: Vec<String> = (0..8).map(|number| format!("many-{number}")).collect();
    let mut pods: Vec<Value> = named
        .iter()
        .map(|name| image_pod(name, &many, json!({})))
        .collect();
    let never = json!({"imagePullPolicy": "Never"});
    pods.extend([
        image_pod("multi", &multi, json!({})),
        image_pod("foreign", &foreign, json!({})),
        image_pod("zstd", &zstd, json!({})),
        image_pod("docker", &docker, json!({})),
        image_pod("bad", &bad, json!({})),
        image_pod("pinned", &pinned, json!({})),
        image_pod("tool", "tool:1", json!({})),
        image_pod("again", "coracle.test/again:1", never),
        image_pod("moving", &moving, json!({})),
    ]);
    cluster.create_objects(&pods);
    for (name, text) in [
        ("multi", "own"),
        ("zstd", "zstd"),
        ("docker", "docker"),
        ("pinned", "own"),
        ("tool", "tool"),
        ("again", "again"),
        ("moving", "old"),
    ] {
        cluster.wait_for_phase(name, "Succeeded");
        assert_eq!(cluster.logs(name, "main"), text);
    }
    let status = cluster.pod("multi");
    let id = format!("{REGISTRY}/team/multi@{index}");
    assert_eq!(container_status(&status, "main")["imageID"], id);
    wait_for_pull_error(
        &mut cluster,
        "foreign",
        "no match for platform linux/amd64 in manifest: it has linux/arm64, linux/s390x",
    );
    wait_for_pull_error(&mut cluster, "bad", " instead of sha256:");

    // One download for all pods on both nodes: a configuration and two layers.
    let mut nodes = Vec::new();
    for name in &named {
        let pod = cluster.wait_for_phase(name, "Succeeded");
        nodes.push(pod["spec"]["nodeName"].to_string());
    }
    nodes.sort();
    nodes.dedup();
    assert_eq!(nodes.len(), 2, "{nodes:?}");
    assert_eq!(registry.successful_requests("GET /v2/team/many/blobs/"), 3);

    // With policy Always, a moved tag is noticed. Unchanged blobs are not downloaded.
    registry.push("team/moving", echo_config("new"), EMPTY_LAYER);
    cluster.create_objects(&[image_pod(
        "present",
        &moving,
        json!({"imagePullPolicy": "IfNotPresent"}),
    )]);
    cluster.wait_for_phase("present", "Succeeded");
    assert_eq!(cluster.logs("present", "main"), "old");
    let always = json!({"imagePullPolicy": "Always"});
    for (name, downloads) in [("always", 1), ("still", 0)] {
        let before = registry.successful_requests("GET /v2/team/moving/blobs/");
        cluster.create_objects(&[image_pod(name, &moving, always.clone())]);
        cluster.wait_for_phase(name, "Succeeded");
        assert_eq!(cluster.logs(name, "main"), "new");
        assert_eq!(
            registry.successful_requests("GET /v2/team/moving/blobs/") - before,
            downloads,
            "{name}"
        );
        cluster.wait_for_event(name, "Normal Pulled Successfully pulled image");
    }

    // Images that were used in the last hour stay, however full the disk is.
    let layers = |lab: &Lab| {
        lab.root("node1", "ls /tmp/coracle-*/layers")
            .succeeded()
            .stdout
    };
    let before = layers(&lab);
    cluster.shell("kubectl delete pod --all --now");
    let log = "kubectl get --raw '/api/v1/nodes/node1/proxy/logs/?query=kubelet'";
    let gc_runs =
        |cluster: &mut TestCluster| cluster.shell(log).matches("0 layers removed").count();
    let so_far = gc_runs(&mut cluster);
    wait_until(30, "garbage collection has run twice", || {
        gc_runs(&mut cluster) >= so_far + 2
    });
    assert_eq!(layers(&lab), before);

    // An unreachable registry affects only pods with policy Always.
    drop((registry, mirror));
    cluster.create_objects(&[
        image_pod("present", &moving, json!({})),
        image_pod("always", &moving, always),
    ]);
    cluster.wait_for_phase("present", "Succeeded");
    assert_eq!(cluster.logs("present", "main"), "new");
    let waiting_pod = cluster.pod_until("always", "waits for the registry", |pod| {
        let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"];
        waiting["message"]
            .as_str()
            .is_some_and(|message| message.contains("team/moving:1"))
    });
    assert_eq!(waiting_pod["status"]["phase"], "Pending");
    cluster.exit(0);
    let names = [
        multi.as_str(),
        &pinned,
        &zstd,
        &docker,
        &moving,
        &many,
        "tool:1",
        "coracle.test/first:1",
        "coracle.test/again:1",
    ];
    lab.sh(&format!("coracle image rm {}", names.join(" ")))
        .run()
        .succeeded();
    lab.remove(".docker");
    lab.remove(DIR);
    lab.assert_nothing_left();
}
