//! Checks manifests on the submitting host, before a job is requested: syntax, the fields that every object has, and the names of
//! images. The API server checks the rest; `coracle run --dry-run` asks one.

use console::{Failure, FailureCode};
use std::io;
use std::path::{Path, PathBuf};

use images::Reference;
use serde_json::Value;

use super::manifest_documents::{self, ManifestDocument};
use super::workload::{MAX_DEPTH, Manifests, is_manifest, unreadable};

/// Limit on the problems that an error lists.
const MAX_PROBLEMS: usize = 10;

/// Checks the files of a workload. Standard input is checked with [`check_text`] by the process that reads it.
pub fn check(manifests: &Manifests) -> Result<(), Failure> {
    let files = match manifests {
        Manifests::File(path) => vec![path.clone()],
        Manifests::Directory(path) => {
            let mut files = Vec::new();
            collect_files(path, 0, &mut files).map_err(|error| unreadable(path, error))?;
            files.sort();
            files
        }
        Manifests::Stdin => return Ok(()),
    };
    let mut sources = Vec::new();
    for file in files {
        let text = std::fs::read(&file).map_err(|error| unreadable(&file, error))?;
        sources.push((file.display().to_string(), text));
    }
    check_sources(&sources)
}

/// Checks manifests that came from standard input.
pub fn check_text(text: &[u8]) -> Result<(), Failure> {
    check_sources(&[("standard input".to_owned(), text.to_vec())])
}

fn check_sources(sources: &[(String, Vec<u8>)]) -> Result<(), Failure> {
    let mut problems = Vec::new();
    let mut objects = 0;
    for (name, text) in sources {
        let place = |line: usize, problem: &str| format!("{name}:{line}: {problem}");
        match manifest_documents::parse(&String::from_utf8_lossy(text)) {
            Ok(documents) => {
                objects += documents.len();
                for ManifestDocument { line, value } in &documents {
                    let found = problems_of_object(value);
                    problems.extend(found.iter().map(|problem| place(*line, problem)));
                }
            }
            Err(error) => problems.push(place(error.line, &error.problem)),
        }
    }
    if problems.is_empty() && objects == 0 {
        let names: Vec<&str> = sources.iter().map(|(name, _)| name.as_str()).collect();
        problems.push(format!("no object in {}", names.join(", ")));
    }
    if problems.is_empty() {
        return Ok(());
    }
    let left_out = problems.len().saturating_sub(MAX_PROBLEMS);
    problems.truncate(MAX_PROBLEMS);
    if left_out > 0 {
        problems.push(format!("and {left_out} more"));
    }
    let list: Vec<String> = problems.iter().map(|line| format!("  {line}")).collect();
    Err(Failure::new(
        FailureCode::BadManifest,
        format!("the manifests are invalid\n{}", list.join("\n")),
    )
    .with_hint(
        "correct these lines; `coracle run --dry-run` then asks an API server about the rest",
    ))
}

/// All manifests below a directory. Links to directories are not followed, as by kubectl.
fn collect_files(dir: &Path, depth: u32, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if depth < MAX_DEPTH {
                collect_files(&path, depth + 1, files)?;
            }
        } else if is_manifest(&path) && !path.is_dir() {
            files.push(path);
        }
    }
    Ok(())
}

/// The problems of one object, or of all objects of a List.
fn problems_of_object(object: &Value) -> Vec<String> {
    if !object.is_object() {
        return vec!["not an object: apiVersion, kind and metadata are expected".to_owned()];
    }
    let mut problems = Vec::new();
    for field in ["apiVersion", "kind"] {
        if let Some(problem) = problem_of_text(object, field) {
            problems.push(problem);
        }
    }
    if !problems.is_empty() {
        return problems;
    }
    let kind = text(object, "/kind");
    if kind.ends_with("List")
        && let Some(items) = object["items"].as_array()
    {
        return items.iter().flat_map(problems_of_object).collect();
    }
    let name = text(object, "/metadata/name");
    if let Some(problem) = problem_of_name(object, kind, name) {
        problems.push(format!("{kind}: {problem}"));
    }
    let images = images_of(object, kind);
    problems.extend(images.into_iter().filter_map(|image| {
        let error = image.parse::<Reference>().err()?;
        Some(format!("{kind} {name}: {error}"))
    }));
    problems
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

fn problem_of_text(object: &Value, field: &str) -> Option<String> {
    match &object[field] {
        Value::String(text) if !text.is_empty() => None,
        Value::Null => Some(format!("no {field}")),
        other => Some(format!("{field} is {other}, not a name")),
    }
}

/// Names are needed because the manifests are applied, not created.
fn problem_of_name(object: &Value, kind: &str, name: &str) -> Option<String> {
    let metadata = &object["metadata"];
    match &metadata["name"] {
        Value::Null if metadata["generateName"].is_string() => {
            return Some("metadata.generateName is not possible here: objects are applied, which needs metadata.name".to_owned());
        }
        Value::Null => return Some("no metadata.name".to_owned()),
        Value::String(_) => {}
        other => return Some(format!("metadata.name is {other}, not a string: quote it")),
    }
    let has_dns_name = matches!(
        kind,
        "Pod"
            | "ConfigMap"
            | "Secret"
            | "ServiceAccount"
            | "PersistentVolumeClaim"
            | "PersistentVolume"
    ) || pod_spec_pointer(kind).is_some();
    let is_valid = if has_dns_name {
        is_dns_subdomain(name)
    } else {
        !name.is_empty() && !name.contains(['/', '%']) && name != "." && name != ".."
    };
    (!is_valid).then(|| {
        format!(
            "metadata.name {name:?} is invalid: lower-case letters, digits, - and . are allowed"
        )
    })
}

/// RFC 1123, as upstream's `IsDNS1123Subdomain`.
fn is_dns_subdomain(name: &str) -> bool {
    let is_label = |label: &str| {
        let alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        label.starts_with(alphanumeric)
            && label.ends_with(alphanumeric)
            && label.chars().all(|c| alphanumeric(c) || c == '-')
    };
    name.len() <= 253 && name.split('.').all(is_label)
}

/// Where objects of this kind have the spec of a pod.
fn pod_spec_pointer(kind: &str) -> Option<&'static str> {
    match kind {
        "Pod" => Some("/spec"),
        "Job"
        | "Deployment"
        | "ReplicaSet"
        | "StatefulSet"
        | "DaemonSet"
        | "ReplicationController" => Some("/spec/template/spec"),
        "CronJob" => Some("/spec/jobTemplate/spec/template/spec"),
        _ => None,
    }
}

fn images_of<'a>(object: &'a Value, kind: &str) -> Vec<&'a str> {
    let Some(spec) = pod_spec_pointer(kind).and_then(|pointer| object.pointer(pointer)) else {
        return Vec::new();
    };
    let containers = ["initContainers", "containers"].map(|field| spec[field].as_array());
    let containers = containers.into_iter().flatten().flatten();
    containers
        .filter_map(|container| container["image"].as_str())
        .filter(|image| !image.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> String {
        let result = check_sources(&[("app.yaml".to_owned(), text.as_bytes().to_vec())]);
        result.map_or_else(|failure| failure.to_string(), |()| String::new())
    }

    const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: [{name: c, image: busybox}]}\n";

    #[test]
    fn valid_manifests_pass() {
        for text in [
            POD.to_owned(),
            format!("---\n{POD}---\n# nothing\n---\n{POD}"),
            "{\"apiVersion\": \"v1\", \"kind\": \"List\", \"items\": []}".to_owned(),
            "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: 'system:x'}\n".to_owned(),
            "apiVersion: example.org/v1\nkind: Odd\nmetadata: {name: Any_Name}\nspec: {image: 'NOT AN IMAGE'}\n".to_owned(),
        ] {
            assert_eq!(problems(&text), "", "{text}");
        }
    }

    #[test]
    fn problems_name_file_and_line() {
        let pod = |from: &str, to: &str| POD.replace(from, to);
        let cases = [
            pod("kind: Pod\n", ""),
            pod("v1", "1"),
            pod("name: a", "name: My_Pod"),
            pod("name: a", "name: 12"),
            pod("name: a", "generateName: a-"),
            pod("busybox", "'Busy Box'"),
            pod("image: busybox", "image: 'site.example/x:'"),
            format!("{POD}---\n- a\n- b\n"),
            format!("{POD}---\nkind: [\n"),
            "# nothing\n".to_owned(),
            format!("apiVersion: v1\nkind: List\nitems: [{{kind: Pod}}]\n---\n{POD}"),
        ];
        let found = cases.map(|text| problems(&text).replace("the manifests are invalid\n", ""));
        insta::assert_snapshot!(found.join("\n"));
    }

    #[test]
    fn only_the_first_problems_are_listed() {
        let text = problems(&"---\nkind: Pod\n".repeat(30));
        assert_eq!(text.lines().count(), 1 + MAX_PROBLEMS + 1, "{text}");
        assert!(text.ends_with("and 20 more"), "{text}");
    }
}
