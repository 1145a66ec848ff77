//! The state of a certificate, and the messages about it. Pure: the time is an argument.

use std::time::Duration;

use tokio::time::Instant;
use volumes::content::CredentialBundle;

/// A warning is recorded if a renewal is late by this time.
const OVERDUE_AFTER: Duration = Duration::from_secs(600);

/// The state of the certificate of one volume source.
#[derive(Clone, Debug, Default)]
pub(in crate::resolve) struct CertificateState {
    /// The certificate in the volume.
    pub issued: Option<IssuedCertificate>,
    /// Why a new certificate is not issued yet.
    pub pending: Option<String>,
    /// The signer has refused a new certificate: there will be none.
    pub refusal: Option<SignerRefusal>,
}

/// An issued certificate.
#[derive(Clone, Debug)]
pub(in crate::resolve) struct IssuedCertificate {
    pub credentials: CredentialBundle,
    /// When to request the next one.
    pub renew: Instant,
    pub expires: Instant,
}

/// A signer's final refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::resolve) struct SignerRefusal {
    /// Namespace and name of the request.
    pub request: String,
    pub kind: RefusalKind,
    pub reason: String,
    pub message: String,
}

/// The type of the condition, and the reason of the Event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::resolve) enum RefusalKind {
    Denied,
    Failed,
}

impl RefusalKind {
    fn as_str(self) -> &'static str {
        match self {
            Self::Denied => "Denied",
            Self::Failed => "Failed",
        }
    }
}

impl CertificateState {
    /// Whether the first request has been decided.
    pub(super) fn is_settled(&self) -> bool {
        self.issued.is_some() || self.refusal.is_some()
    }

    /// The content of the volume. An issued certificate stays there even if its renewal is refused, so that a running pod keeps it
    /// and still gets updates of its other volumes.
    pub(super) fn credentials(&self) -> Result<CredentialBundle, String> {
        if let Some(issued) = &self.issued {
            return Ok(issued.credentials.clone());
        }
        Err(match (&self.refusal, &self.pending) {
            (Some(refusal), _) => format!(
                "PodCertificateRequest was permanently {}: reason={:?} message={:?}",
                refusal.kind.as_str().to_lowercase(),
                refusal.reason,
                refusal.message
            ),
            (None, Some(why)) => format!("credential bundle is not issued yet: {why}"),
            (None, None) => "credential bundle is not issued yet".to_owned(),
        })
    }

    /// Warning events: reason and message. `description` names the volume and the signer.
    pub(super) fn warnings(&self, description: &str, now: Instant) -> Vec<(&'static str, String)> {
        let mut warnings = vec![];
        if let Some(SignerRefusal {
            request,
            kind,
            reason,
            message,
        }) = &self.refusal
        {
            let verb = match kind {
                RefusalKind::Denied => "was denied",
                RefusalKind::Failed => "failed",
            };
            let message = format!(
                "PodCertificateRequest {request} {verb}, reason={reason:?}, message={message:?}"
            );
            warnings.push((kind.as_str(), message));
        }
        if let Some(issued) = &self.issued {
            if now >= issued.renew + OVERDUE_AFTER {
                let message = format!("PodCertificate refresh overdue: {description}");
                warnings.push(("CertificateOverdueForRefresh", message));
            }
            if now >= issued.expires {
                warnings.push((
                    "CertificateExpired",
                    format!("PodCertificate expired: {description}"),
                ));
            }
        }
        warnings
    }

    /// The time of the next warning, if the state does not change until then.
    pub(super) fn next_warning_at(&self, now: Instant) -> Option<Instant> {
        let issued = self.issued.as_ref()?;
        let times = [issued.renew + OVERDUE_AFTER, issued.expires];
        times.into_iter().filter(|&time| time > now).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn issued(now: Instant) -> CertificateState {
        CertificateState {
            issued: Some(IssuedCertificate {
                credentials: CredentialBundle {
                    key: "key".to_owned(),
                    chain: "chain".to_owned(),
                },
                renew: now + Duration::from_secs(1000),
                expires: now + Duration::from_secs(3600),
            }),
            ..Default::default()
        }
    }

    fn refusal(kind: RefusalKind) -> Option<SignerRefusal> {
        Some(SignerRefusal {
            request: "n/req-1".to_owned(),
            kind,
            reason: "UnsupportedKeyType".to_owned(),
            message: "try RSA3072".to_owned(),
        })
    }

    #[test]
    fn messages_without_certificate() {
        let now = Instant::now();
        let messages = |state: CertificateState| {
            let why = state.credentials().unwrap_err();
            (why, state.warnings("volume \"v\"", now))
        };
        let waiting = CertificateState {
            pending: Some("signer \"s/s\" has not answered".to_owned()),
            ..Default::default()
        };
        let refused = |kind| CertificateState {
            refusal: refusal(kind),
            ..Default::default()
        };
        assert!(!waiting.is_settled() && refused(RefusalKind::Denied).is_settled());
        insta::assert_debug_snapshot!([
            messages(CertificateState::default()),
            messages(waiting),
            messages(refused(RefusalKind::Denied)),
            messages(refused(RefusalKind::Failed)),
        ]);
    }

    #[test]
    fn certificate_is_kept_if_renewal_is_refused() {
        let now = Instant::now();
        let mut state = issued(now);
        let after = |seconds| now + Duration::from_secs(seconds);
        let reasons = |state: &CertificateState, seconds| {
            let warnings = state.warnings("volume \"v\"", after(seconds));
            let reasons: Vec<_> = warnings.into_iter().map(|(reason, _)| reason).collect();
            reasons.join(" ")
        };
        assert_eq!(reasons(&state, 1500), "");
        assert_eq!(state.next_warning_at(now), Some(after(1600)));
        assert_eq!(reasons(&state, 1600), "CertificateOverdueForRefresh");
        assert_eq!(state.next_warning_at(after(1600)), Some(after(3600)));
        state.refusal = refusal(RefusalKind::Denied);
        assert_eq!(
            reasons(&state, 3600),
            "Denied CertificateOverdueForRefresh CertificateExpired"
        );
        assert_eq!(state.next_warning_at(after(3600)), None);
        assert_eq!(state.credentials().unwrap().key, "key");
    }
}
