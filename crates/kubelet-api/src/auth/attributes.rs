//! The RBAC permission that a request needs: upstream's map of paths to subresources of the Node.

use axum::http::Method;

/// The subresources that grant access to a path, the narrowest first. Any one of them is enough.
pub(super) fn subresources(path: &str) -> &'static [&'static str] {
    const MAP: &[(&str, &[&str])] = &[
        ("/pods", &["pods", "proxy"]),
        ("/allocatedPods", &["pods", "proxy"]),
        ("/runningpods", &["pods", "proxy"]),
        ("/healthz", &["healthz", "proxy"]),
        ("/configz", &["configz", "proxy"]),
        ("/stats", &["stats"]),
        ("/metrics", &["metrics"]),
        ("/logs", &["log"]),
        ("/checkpoint", &["checkpoint"]),
        ("/statusz", &["statusz"]),
        ("/flagz", &["configz"]),
    ];
    let found = MAP.iter().find(|(prefix, _)| is_below(path, prefix));
    found.map_or(&["proxy"], |(_, subresources)| subresources)
}

fn is_below(path: &str, prefix: &str) -> bool {
    let rest = path.strip_prefix(prefix);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The API's verb for a request. RequestedExec, attach and port-forward need `create` whatever the method: a WebSocket begins with a GET, and
/// the permission to read must not allow running commands. Upstream's API server requires the same on pods
/// (AuthorizePodWebsocketUpgradeCreatePermission).
pub(super) fn verb(method: &Method, path: &str) -> &'static str {
    const STREAMS: &[&str] = &["/exec", "/attach", "/portForward"];
    if STREAMS.iter().any(|prefix| is_below(path, prefix)) {
        return "create";
    }
    match *method {
        Method::POST => "create",
        Method::GET => "get",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_map_to_upstreams_subresources() {
        assert_eq!(subresources("/pods"), ["pods", "proxy"]);
        assert_eq!(subresources("/pods/"), ["pods", "proxy"]);
        assert_eq!(subresources("/runningpods/"), ["pods", "proxy"]);
        assert_eq!(subresources("/healthz/ping"), ["healthz", "proxy"]);
        assert_eq!(subresources("/stats/summary"), ["stats"]);
        assert_eq!(subresources("/metrics/resource"), ["metrics"]);
        assert_eq!(subresources("/logs/"), ["log"]);
        assert_eq!(subresources("/containerLogs/ns/pod/c"), ["proxy"]);
        assert_eq!(subresources("/exec/ns/pod/c"), ["proxy"]);
        assert_eq!(subresources("/podsandmore"), ["proxy"]);
    }

    #[test]
    fn methods_map_to_api_verbs() {
        let verb = |method| verb(&method, "/containerLogs/ns/pod/c");
        assert_eq!(verb(Method::GET), "get");
        assert_eq!(verb(Method::POST), "create");
        assert_eq!(verb(Method::HEAD), "");
    }

    #[test]
    fn streams_need_create_for_every_method() {
        for path in [
            "/exec/ns/pod/c",
            "/exec/ns/pod/uid/c",
            "/attach/ns/pod/c",
            "/portForward/ns/pod",
        ] {
            for method in [Method::GET, Method::POST, Method::HEAD] {
                assert_eq!(verb(&method, path), "create", "{method} {path}");
            }
        }
        assert_eq!(verb(&Method::GET, "/execute"), "get");
    }
}
