//! Service account tokens: bound to their pod and its node, accepted by the API server, and renewed while the pod runs.

use e2e::{BUSYBOX, Lab, Role, TestCluster, pod, wait_until};
use serde_json::{Value, json};

/// The machine's own curl.
const CURL: &str = "coracle.test/curl:1";
const CURL_LAYER: &str = r"
cp --parents --dereference /usr/bin/curl .
ldd /usr/bin/curl | grep --only-matching '/[^ ]*' | sort --unique | xargs cp --parents --dereference --target-directory=.
tar --owner=0 --group=0 --create *
";

/// Asks the API server for the identity of a token.
const REVIEW: &str = r#"{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}"#;
const PATH: &str = "apis/authentication.k8s.io/v1/selfsubjectreviews";

/// The decoded claims of a token.
#[track_caller]
fn claims(cluster: &mut TestCluster, token: &str) -> Value {
    let part = token.split('.').nth(1).expect("three parts");
    let text = cluster.shell(&format!(
        "echo '{part}===' | tr -- -_ +/ | base64 --decode 2> /dev/null || true"
    ));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// The status of the API server's response to a request with this token.
#[track_caller]
fn status_for(cluster: &mut TestCluster, token: &str) -> String {
    cluster.shell(&format!(
        "curl -sk -o /dev/null -w %{{http_code}} -H 'Authorization: Bearer {token}' -H 'Content-Type: application/json' --data '{REVIEW}' $K8S_CLUSTER_API/{PATH}"
    ))
}

#[test]
fn tokens_are_bound_and_renewed() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let config = json!({"Env": ["PATH=/usr/bin:/bin"], "Cmd": ["sh"]});
    lab.load_image(CURL, config, CURL_LAYER);
    let mut cluster = TestCluster::start_as(&lab, "user1", &["srun", "-N1", "coracle", "run"]);
    cluster.shell("kubectl create serviceaccount robot");
    let api = cluster.shell("echo $K8S_CLUSTER_API");
    // With hostNetwork: pods cannot reach the API server through the pod network yet.
    let script = format!(
        "cd /var/run/secrets/kubernetes.io/serviceaccount && curl --silent --show-error --cacert ca.crt --header \"Authorization: Bearer $$(cat token)\" --header 'Content-Type: application/json' --data '{REVIEW}' {api}/{PATH}"
    );
    let requesting = json!({"name": "main", "image": CURL, "imagePullPolicy": "Never", "command": ["sh", "-c", script]});
    let of_robot = json!({"serviceAccountName": "robot", "hostNetwork": true});
    // Prints each token that it sees, and the target of the volume's `..data` link.
    let watching = "old=; while :; do new=$$(cat /t/token); test \"$$new\" = \"$$old\" || echo \"$$(readlink /t/..data) $$new\"; old=$$new; sleep 0.2; done";
    let watching = json!({"name": "main", "image": BUSYBOX, "command": ["sh", "-c", watching],
        "volumeMounts": [{"name": "t", "mountPath": "/t"}]});
    let token = json!({"serviceAccountToken": {"path": "token", "expirationSeconds": 600}});
    let volume = json!({"name": "t", "projected": {"sources": [token]}});
    cluster.create_objects(&[
        pod("requesting", of_robot, &[requesting]),
        pod(
            "watching",
            json!({"serviceAccountName": "robot", "volumes": [volume]}),
            &[watching],
        ),
    ]);

    let pod_with_curl = cluster.wait_for_phase("requesting", "Succeeded");
    let review = cluster.logs("requesting", "main");
    let review: Value =
        serde_json::from_str(&review).unwrap_or_else(|error| panic!("{error}: {review}"));
    let user = &review["status"]["userInfo"];
    assert_eq!(user["username"], "system:serviceaccount:default:robot");
    let extra =
        |name: &str| user["extra"][format!("authentication.kubernetes.io/{name}")][0].clone();
    assert_eq!(extra("pod-name"), "requesting", "{review:#}");
    assert_eq!(
        extra("pod-uid"),
        pod_with_curl["metadata"]["uid"],
        "{review:#}"
    );
    assert_eq!(extra("node-name"), "node1", "{review:#}");

    let tokens = |cluster: &mut TestCluster| -> Vec<(String, String)> {
        // Ignore errors: logs are unavailable while no agent runs.
        let (_, logs) = cluster.try_shell("kubectl logs watching | grep '^[.][.]'");
        let lines = logs.lines().filter_map(|line| line.split_once(' '));
        lines
            .map(|(dir, token)| (dir.to_owned(), token.to_owned()))
            .collect()
    };
    cluster.wait_for_phase("watching", "Running");
    wait_until(30, "the pod has a token", || {
        !tokens(&mut cluster).is_empty()
    });
    let (dir, first) = tokens(&mut cluster).remove(0);
    let token_claims = claims(&mut cluster, &first);
    let watcher = cluster.pod("watching");
    let bound = &token_claims["kubernetes.io"];
    assert_eq!(bound["pod"]["name"], "watching", "{token_claims:#}");
    assert_eq!(
        bound["pod"]["uid"], watcher["metadata"]["uid"],
        "{token_claims:#}"
    );
    assert_eq!(bound["node"]["name"], "node1", "{token_claims:#}");
    assert_eq!(bound["serviceaccount"]["name"], "robot", "{token_claims:#}");
    let lifetime = token_claims["exp"].as_i64().unwrap() - token_claims["iat"].as_i64().unwrap();
    assert_eq!(lifetime, 600, "{token_claims:#}");

    // A token is valid for at least ten minutes, too long for a test. (The kubelet's unit tests show, with a simulated clock, that
    // it is renewed after eight.) A new agent has no token in its cache and requests another.
    let agent = lab.find("node1", Role::Agent);
    lab.kill("node1", "KILL", &agent);
    wait_until(60, "the pod has another token", || {
        tokens(&mut cluster).len() == 2
    });
    let (other_dir, second) = tokens(&mut cluster).remove(1);
    assert_ne!(dir, other_dir, "the volume is updated atomically");
    let renewed = claims(&mut cluster, &second);
    assert_eq!(renewed["kubernetes.io"], token_claims["kubernetes.io"]);
    assert_ne!(renewed["jti"], token_claims["jti"]);
    assert!(
        renewed["exp"].as_i64() >= token_claims["exp"].as_i64(),
        "{renewed:#}"
    );

    // Both tokens are valid until they expire, or until their pod is deleted.
    for token in [&first, &second] {
        assert_eq!(status_for(&mut cluster, token), "201");
    }
    cluster.shell("kubectl delete pod watching --wait --grace-period=1 --timeout=50s");
    // The API server caches an accepted token for ten seconds.
    wait_until(40, "tokens of the deleted pod are rejected", || {
        [&first, &second]
            .iter()
            .all(|token| status_for(&mut cluster, token) == "401")
    });
    cluster.exit(0);
    lab.assert_nothing_left();
}
