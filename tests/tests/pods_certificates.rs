//! The sources clusterTrustBundle and podCertificate of projected volumes.

use std::error::Error;

use e2e::{
    CERTIFICATE_NAME, Held, KEY_TYPES, Lab, Role, Signer, TestCluster, WAIT_FOR_SIGTERM,
    checking_pod, eventually, pod, refusal, script_container, wait_until,
};
use serde_json::{Value, json};

const ONE: &[&str] = &["srun", "-N1", "coracle", "run"];

const SIGNER: &str = "coracle.test/signer";

/// A ClusterTrustBundle, with a signer or without.
fn bundle(name: &str, signer: Option<&str>, alive: bool, authorities: &[&Signer]) -> Value {
    let text: String = authorities
        .iter()
        .map(|signer| format!("a comment\n{}", signer.authority))
        .collect();
    json!({
        "apiVersion": "certificates.k8s.io/v1", "kind": "ClusterTrustBundle",
        "metadata": {"name": name, "labels": {"alive": alive.to_string()}},
        "spec": {"signerName": signer, "trustBundle": text},
    })
}

fn trust(path: &str, more: Value) -> Value {
    json!({"clusterTrustBundle": e2e::merged(json!({"path": path}), more)})
}

fn certificate(key_type: &str, more: Value) -> Value {
    let own = json!({"signerName": SIGNER, "keyType": key_type, "credentialBundlePath": "all.pem"});
    json!({"podCertificate": e2e::merged(own, more)})
}

/// The projected volume `v` with these sources.
fn volume(sources: &[Value]) -> Value {
    json!([{"name": "v", "projected": {"sources": sources}}])
}

fn mounted() -> Value {
    json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]})
}

/// A pod that runs until it is deleted.
fn long_running(name: &str, sources: &[Value]) -> Value {
    let container = script_container("main", WAIT_FOR_SIGTERM, mounted());
    pod(name, json!({"volumes": volume(sources)}), &[container])
}

/// Responds to all pending PodCertificateRequests.
#[track_caller]
fn sign_all(cluster: &mut TestCluster, signer: &Signer) -> Result<(), Box<dyn Error>> {
    let all = cluster.json("get podcertificaterequests");
    let items = all["items"].as_array().into_iter().flatten();
    for request in items.filter(|request| request["status"]["conditions"].is_null()) {
        let status = match request["spec"]["podName"].as_str() {
            Some("denied") => refusal("Denied")?,
            Some("failed") => refusal("Failed")?,
            Some("ignored") => continue,
            _ => signer.issue(request)?,
        };
        let name = request["metadata"]["name"].as_str().unwrap_or_default();
        let patch = json!({"status": status});
        cluster.shell(&format!(
            "kubectl patch podcertificaterequest {name} --subresource=status --type=merge --patch='{patch}'"
        ));
    }
    Ok(())
}

/// The content of a file in a pod.
#[track_caller]
fn file(cluster: &mut TestCluster, pod: &str, path: &str) -> String {
    cluster.shell(&format!("kubectl exec {pod} -- cat /v/{path}"))
}

/// Signs requests until a pod runs.
#[track_caller]
fn sign_until_running(cluster: &mut TestCluster, signer: &Signer, pod: &str) {
    let runs = eventually(std::time::Duration::from_secs(90), || {
        sign_all(cluster, signer).ok()?;
        (cluster.pod(pod)["status"]["phase"] == "Running").then_some(())
    });
    assert!(runs.is_some(), "{pod} never ran:\n{}", cluster.events(pod));
}

#[test]
fn trust_bundles_and_pod_certificates_are_projected() {
    let lab = Lab::acquire();
    lab.load_busybox_for("user1");
    let mut cluster = TestCluster::start_as(&lab, "user1", ONE);
    let signer = Signer::new("signer").unwrap();
    assert_trust_bundles_are_projected(&mut cluster, &signer);
    assert_certificates_match_requests(&lab, &mut cluster, &signer);
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[track_caller]
fn assert_trust_bundles_are_projected(cluster: &mut TestCluster, signer: &Signer) {
    let other = Signer::new("other").unwrap_or_else(|error| panic!("{error}"));
    let alive = json!({"matchLabels": {"alive": "true"}});
    let no_match = json!({"matchLabels": {"alive": "unknown"}});
    let by_labels = |selector: &Value| json!({"signerName": SIGNER, "labelSelector": selector});
    let sources = [
        trust("named", json!({"name": "plain"})),
        trust("alive", by_labels(&alive)),
        trust("all", by_labels(&json!({}))),
        trust(
            "none",
            e2e::merged(by_labels(&no_match), json!({"optional": true})),
        ),
        trust("unset", json!({"signerName": SIGNER, "optional": true})),
        trust("absent", json!({"name": "absent", "optional": true})),
    ];
    let script = r#"
count() { grep -c BEGIN /v/$1; }
is named 1 "$(count named)"
is alive 1 "$(count alive)"
is all 2 "$(count all)"
works cmp /v/named /v/alive
is empty '' "$(cat /v/none /v/unset /v/absent)"
is comments 0 "$(cat /v/* | grep -c comment)"
is mode 644 "$(stat -L -c %a /v/all)"
is link ..data/all "$(readlink /v/all)"
"#;
    let without_source = |name: &str, source: Value| {
        checking_pod(
            name,
            json!({"volumes": volume(&[source])}),
            mounted(),
            "true",
        )
    };
    cluster.create_objects(&[
        bundle("plain", None, true, &[signer]),
        bundle("coracle.test:signer:a", Some(SIGNER), true, &[signer]),
        bundle(
            "coracle.test:signer:b",
            Some(SIGNER),
            false,
            &[&other, signer],
        ),
        checking_pod(
            "trusting",
            json!({"volumes": volume(&sources)}),
            mounted(),
            script,
        ),
        long_running("following", &sources),
        without_source("no-bundle", trust("x", json!({"name": "absent"}))),
        without_source("no-match", trust("x", by_labels(&no_match))),
    ]);
    cluster.assert_checks_pass(&["trusting"]);
    for (pod, expected) in [
        (
            "no-bundle",
            r#"volume "v" : clustertrustbundle.certificates.k8s.io "absent" not found"#,
        ),
        (
            "no-match",
            r#"matched zero ClusterTrustBundles: signerName "coracle.test/signer", labelSelector "alive=unknown""#,
        ),
    ] {
        cluster.wait_for_event(pod, expected);
        assert_eq!(cluster.pod(pod)["status"]["phase"], "Pending", "{pod}");
    }

    // Changes reach the running pod, and the pod whose source was missing starts.
    cluster.wait_for_phase("following", "Running");
    let patch = json!({"spec": {"trustBundle": other.authority}});
    cluster.shell(&format!(
        "kubectl patch clustertrustbundle plain --type=merge --patch='{patch}'; kubectl delete clustertrustbundle coracle.test:signer:b"
    ));
    wait_until(60, "the pod sees the new bundle", || {
        let command = "kubectl exec following -- sh -c 'cat /v/named; cat /v/all'";
        let seen = cluster.shell(command).replace('\n', "");
        let expected = format!("{}{}", other.authority, signer.authority);
        seen == expected.replace(['\n', '\r'], "")
    });
    cluster.create_objects(&[bundle("absent", None, true, &[&other])]);
    cluster.wait_for_phase("no-bundle", "Succeeded");
    cluster.shell("kubectl delete pod --all --now");
}

#[track_caller]
fn assert_certificates_match_requests(lab: &Lab, cluster: &mut TestCluster, signer: &Signer) {
    let parts = |key_type: &str| {
        let name = format!("{}.test", key_type.to_lowercase());
        let paths = json!({"credentialBundlePath": null, "keyPath": format!("{key_type}.key"), "certificateChainPath": format!("{key_type}.crt"),
            "userAnnotations": {CERTIFICATE_NAME: name}, "maxExpirationSeconds": 7200});
        certificate(key_type, paths)
    };
    let sources = KEY_TYPES.map(parts);
    let script = r#"
is files 'all.pem token' "$(echo $(ls /v))"
is blocks 'PRIVATE KEY CERTIFICATE CERTIFICATE' "$(echo $(sed -n 's/-----BEGIN \(.*\)-----/\1/p' /v/all.pem))"
is mode 600 "$(stat -L -c %a /v/all.pem)"
is user 1000 "$(stat -L -c %u /v/all.pem)"
is "file system" tmpfs "$(awk '$2 == "/v" { print $3 }' /proc/self/mounts)"
"#;
    let token = json!({"serviceAccountToken": {"path": "token"}});
    let private = json!({"securityContext": {"runAsUser": 1000}, "volumes": volume(&[certificate("ECDSAP256", json!({})), token])});
    cluster.create_objects(&[
        long_running("certified", &sources),
        checking_pod("private", private, mounted(), script),
        long_running("denied", &[certificate("ED25519", json!({}))]),
        long_running("failed", &[certificate("ED25519", json!({}))]),
        long_running("ignored", &[certificate("ED25519", json!({}))]),
    ]);
    sign_until_running(cluster, signer, "certified");
    for key_type in KEY_TYPES {
        let expected = Held {
            name: format!("{}.test", key_type.to_lowercase()),
            life: 7200,
            chain: 2,
        };
        assert_eq!(held(cluster, "certified", key_type), expected, "{key_type}");
    }
    cluster.assert_checks_pass(&["private"]);
    for (pod, reason, verb) in [
        ("denied", "Denied", "was denied"),
        ("failed", "Failed", "failed"),
    ] {
        cluster.wait_for_event(
            pod,
            &format!("{verb}, reason=\"Whim\", message=\"not today\""),
        );
        cluster.wait_for_event(pod, &format!("Warning {reason} "));
        cluster.wait_for_event(
            pod,
            &format!(
                "PodCertificateRequest was permanently {}",
                reason.to_lowercase()
            ),
        );
        assert_eq!(cluster.pod(pod)["status"]["phase"], "Pending", "{pod}");
    }
    cluster.wait_for_event(
        "ignored",
        "credential bundle is not issued yet: signer \"coracle.test/signer\" has not answered PodCertificateRequest default/req-",
    );

    // A new agent makes a new request. Until it is granted, the pod keeps its old certificate.
    let before = file(cluster, "certified", "ED25519.key");
    let node = cluster.first_node();
    let killed = lab.find(&node, Role::Agent);
    lab.kill(&node, "KILL", &killed);
    wait_until(90, "the pod has a new certificate", || {
        sign_all(cluster, signer).unwrap_or_else(|error| panic!("{error}"));
        let (code, now) = cluster.try_shell("kubectl exec certified -- cat /v/ED25519.key");
        code == 0 && now != before
    });
    let status = &cluster.pod("certified")["status"]["containerStatuses"][0];
    assert_eq!(status["restartCount"], 0);
    wait_until(30, "key and certificate match", || {
        held(cluster, "certified", "ED25519").chain == 2
    });

    // Requests are deleted with their pods.
    cluster.shell("kubectl delete pod --all --now");
    wait_until(60, "requests are deleted", || {
        cluster.json("get podcertificaterequests")["items"] == json!([])
    });
}

/// The certificate of this key type in a pod.
#[track_caller]
fn held(cluster: &mut TestCluster, pod: &str, key_type: &str) -> Held {
    let key = file(cluster, pod, &format!("{key_type}.key"));
    let chain = file(cluster, pod, &format!("{key_type}.crt"));
    Held::read(&key, &chain).unwrap_or_else(|error| panic!("{key_type}: {error}"))
}
