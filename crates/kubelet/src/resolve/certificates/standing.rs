//! How a certificate stands, and what a pod is told of it. Pure, but for the clock that is handed in.

use std::time::Duration;

use tokio::time::Instant;
use volumes::content::Credentials;

/// A certificate that should have been renewed so long ago is worth a warning.
const OVERDUE: Duration = Duration::from_secs(600);

/// What has become of one source of a projected volume.
#[derive(Clone, Debug, Default)]
pub(in crate::resolve) struct Standing {
    /// What the volume holds.
    pub issued: Option<Issued>,
    /// Why there is nothing yet.
    pub trouble: Option<String>,
    /// There will be nothing, or nothing newer.
    pub refusal: Option<Refusal>,
}

/// A certificate.
#[derive(Clone, Debug)]
pub(in crate::resolve) struct Issued {
    pub credentials: Credentials,
    /// When to ask for the next one.
    pub renew: Instant,
    pub expires: Instant,
}

/// The signer's last word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::resolve) struct Refusal {
    /// Namespace and name of the request.
    pub request: String,
    /// `Denied` or `Failed`, as the condition and the Event.
    pub kind: &'static str,
    pub reason: String,
    pub message: String,
}

impl Standing {
    /// Whether waiting is of no use.
    pub(super) fn is_settled(&self) -> bool {
        self.issued.is_some() || self.refusal.is_some()
    }

    /// What the volume holds: as long as there is a certificate, that, even if there won't be another one. A pod that runs
    /// keeps what it has, and its other volumes go on to change.
    pub(super) fn credentials(&self) -> Result<Credentials, String> {
        if let Some(issued) = &self.issued {
            return Ok(issued.credentials.clone());
        }
        Err(match (&self.refusal, &self.trouble) {
            (Some(refusal), _) => format!(
                "PodCertificateRequest was permanently {}: reason={:?} message={:?}",
                refusal.kind.to_lowercase(),
                refusal.reason,
                refusal.message
            ),
            (None, Some(trouble)) => format!("credential bundle is not issued yet: {trouble}"),
            (None, None) => "credential bundle is not issued yet".to_owned(),
        })
    }

    /// Events about it, reason and message; `whose` is the volume and the signer.
    pub(super) fn warnings(&self, whose: &str, now: Instant) -> Vec<(&'static str, String)> {
        let mut warnings = vec![];
        if let Some(Refusal {
            request,
            kind,
            reason,
            message,
        }) = &self.refusal
        {
            let what = if *kind == "Denied" {
                "was denied"
            } else {
                "failed"
            };
            let words = format!(
                "PodCertificateRequest {request} {what}, reason={reason:?}, message={message:?}"
            );
            warnings.push((*kind, words));
        }
        if let Some(issued) = &self.issued {
            if now >= issued.renew + OVERDUE {
                let words = format!("PodCertificate refresh overdue: {whose}");
                warnings.push(("CertificateOverdueForRefresh", words));
            }
            if now >= issued.expires {
                warnings.push((
                    "CertificateExpired",
                    format!("PodCertificate expired: {whose}"),
                ));
            }
        }
        warnings
    }

    /// When there will be another warning, if nothing happens until then.
    pub(super) fn again_at(&self, now: Instant) -> Option<Instant> {
        let issued = self.issued.as_ref()?;
        let moments = [issued.renew + OVERDUE, issued.expires];
        moments.into_iter().filter(|&moment| moment > now).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn issued(now: Instant) -> Standing {
        Standing {
            issued: Some(Issued {
                credentials: Credentials {
                    key: "key".to_owned(),
                    chain: "chain".to_owned(),
                },
                renew: now + Duration::from_secs(1000),
                expires: now + Duration::from_secs(3600),
            }),
            ..Default::default()
        }
    }

    fn refusal(kind: &'static str) -> Option<Refusal> {
        Some(Refusal {
            request: "n/req-1".to_owned(),
            kind,
            reason: "UnsupportedKeyType".to_owned(),
            message: "try RSA3072".to_owned(),
        })
    }

    #[test]
    fn what_a_pod_without_a_certificate_is_told() {
        let now = Instant::now();
        let told = |standing: Standing| {
            let why = standing.credentials().unwrap_err();
            (why, standing.warnings("volume \"v\"", now))
        };
        let waiting = Standing {
            trouble: Some("signer \"s/s\" has not answered".to_owned()),
            ..Default::default()
        };
        let refused = |kind| Standing {
            refusal: refusal(kind),
            ..Default::default()
        };
        assert!(!waiting.is_settled() && refused("Denied").is_settled());
        insta::assert_debug_snapshot!([
            told(Standing::default()),
            told(waiting),
            told(refused("Denied")),
            told(refused("Failed")),
        ]);
    }

    #[test]
    fn a_certificate_is_kept_whatever_becomes_of_the_next_one() {
        let now = Instant::now();
        let mut standing = issued(now);
        let after = |seconds| now + Duration::from_secs(seconds);
        let reasons = |standing: &Standing, seconds| {
            let warnings = standing.warnings("volume \"v\"", after(seconds));
            let reasons: Vec<_> = warnings.into_iter().map(|(reason, _)| reason).collect();
            reasons.join(" ")
        };
        assert_eq!(reasons(&standing, 1500), "");
        assert_eq!(standing.again_at(now), Some(after(1600)));
        assert_eq!(reasons(&standing, 1600), "CertificateOverdueForRefresh");
        assert_eq!(standing.again_at(after(1600)), Some(after(3600)));
        standing.refusal = refusal("Denied");
        assert_eq!(
            reasons(&standing, 3600),
            "Denied CertificateOverdueForRefresh CertificateExpired"
        );
        assert_eq!(standing.again_at(after(3600)), None);
        assert_eq!(standing.credentials().unwrap().key, "key");
    }
}
