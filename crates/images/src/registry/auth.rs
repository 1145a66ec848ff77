//! Authentication challenges of registries (`WWW-Authenticate`), and the headers that answer them.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use serde::Deserialize;

use super::credentials::RegistrySecret;

/// An authentication challenge of a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Challenge {
    /// A user name and a password with every request.
    Basic,
    /// A token from a token server.
    Bearer {
        /// The URL of the token server.
        realm: String,
        /// The registry's name on the token server.
        service: Option<String>,
        /// The scope that the token needs, if the registry says so.
        scope: Option<String>,
    },
}

impl Challenge {
    /// The preferred challenge of a response: Bearer before Basic.
    pub fn of(headers: &HeaderMap) -> Option<Challenge> {
        let all: Vec<_> = headers
            .get_all(WWW_AUTHENTICATE)
            .iter()
            .filter_map(|header| header.to_str().ok())
            .filter_map(Challenge::parse)
            .collect();
        let bearer = all.iter().find(|challenge| **challenge != Challenge::Basic);
        bearer.or(all.first()).cloned()
    }

    fn parse(header: &str) -> Option<Challenge> {
        let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Challenge::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let (mut realm, mut service, mut scope) = (None, None, None);
        for (key, value) in parameters(rest) {
            match key.to_ascii_lowercase().as_str() {
                "realm" => realm = Some(value),
                "service" => service = Some(value),
                "scope" => scope = Some(value),
                _ => {}
            }
        }
        Some(Challenge::Bearer {
            realm: realm?,
            service,
            scope,
        })
    }
}

/// Parses `key="value",key=value`; a backslash escapes a character within quotes.
fn parameters(text: &str) -> Vec<(String, String)> {
    let mut all = Vec::new();
    let mut letters = text.chars().peekable();
    loop {
        let key: String = std::iter::from_fn(|| letters.next_if(|c| *c != '=')).collect();
        if letters.next().is_none() {
            return all;
        }
        let mut value = String::new();
        if letters.next_if_eq(&'"').is_some() {
            while let Some(letter) = letters.next() {
                match letter {
                    '"' => break,
                    '\\' => value.extend(letters.next()),
                    other => value.push(other),
                }
            }
            while letters.next_if(|c| *c != ',').is_some() {}
        } else {
            value.extend(std::iter::from_fn(|| letters.next_if(|c| *c != ',')));
        }
        letters.next();
        let key = key.trim_matches(|c: char| c == ',' || c.is_whitespace());
        all.push((key.to_owned(), value.trim().to_owned()));
    }
}

/// `Authorization: Basic …`
pub fn basic(username: &str, password: &str) -> Option<HeaderValue> {
    secret_header(&format!(
        "Basic {}",
        STANDARD.encode(format!("{username}:{password}"))
    ))
}

/// `Authorization: Bearer …`
pub fn bearer(token: &str) -> Option<HeaderValue> {
    secret_header(&format!("Bearer {token}"))
}

fn secret_header(text: &str) -> Option<HeaderValue> {
    let mut header = HeaderValue::from_str(text).ok()?;
    header.set_sensitive(true);
    Some(header)
}

/// A request to a token server.
#[derive(Debug)]
pub struct TokenRequest {
    /// The URL, without secrets.
    pub url: Url,
    /// The `Authorization` header, for a user name and a password.
    pub header: Option<HeaderValue>,
    /// The body of a POST, for an identity token.
    pub form: Option<String>,
}

impl TokenRequest {
    /// A request for a token with `scope`.
    pub fn new(
        realm: &Url,
        service: Option<&str>,
        scope: &str,
        secret: Option<&RegistrySecret>,
    ) -> TokenRequest {
        let mut url = realm.clone();
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        pairs.extend(service.map(|service| ("service", service)));
        pairs.push(("scope", scope));
        if let Some(RegistrySecret::IdentityToken(token)) = secret {
            pairs.extend([
                ("grant_type", "refresh_token"),
                ("client_id", "coracle"),
                ("refresh_token", token),
            ]);
            // A scratch URL, only to encode the form: the secret must not be in the request's URL.
            let mut form = realm.clone();
            form.set_query(None);
            form.query_pairs_mut().extend_pairs(pairs);
            return TokenRequest {
                url,
                header: None,
                form: Some(form.query().unwrap_or_default().to_owned()),
            };
        }
        url.query_pairs_mut().extend_pairs(pairs);
        TokenRequest {
            url,
            header: match secret {
                Some(RegistrySecret::Password { username, password }) => basic(username, password),
                _ => None,
            },
            form: None,
        }
    }
}

/// The token in a token server's response.
pub fn token_of(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct TokenResponse {
        token: Option<String>,
        access_token: Option<String>,
    }
    let response: TokenResponse = serde_json::from_slice(body).ok()?;
    let non_empty = |token: &String| !token.is_empty();
    response
        .token
        .filter(non_empty)
        .or(response.access_token.filter(non_empty))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn challenge(headers: &[&str]) -> Option<Challenge> {
        let mut map = HeaderMap::new();
        for header in headers {
            map.append(WWW_AUTHENTICATE, HeaderValue::from_str(header).unwrap());
        }
        Challenge::of(&map)
    }

    #[test]
    fn challenges_are_parsed() {
        let hub = r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:library/a:pull,push""#;
        let expected = Challenge::Bearer {
            realm: "https://auth.docker.io/token".into(),
            service: Some("registry.docker.io".into()),
            scope: Some("repository:library/a:pull,push".into()),
        };
        assert_eq!(challenge(&[hub]), Some(expected.clone()));
        assert_eq!(challenge(&["Basic realm=\"x\"", hub]), Some(expected));
        assert_eq!(challenge(&["basic"]), Some(Challenge::Basic));
        assert_eq!(challenge(&["Negotiate"]), None);
        assert_eq!(challenge(&["Bearer service=a"]), None);
        assert_eq!(
            challenge(&[r#"bearer realm=https://a/t, service="a\"b""#]),
            Some(Challenge::Bearer {
                realm: "https://a/t".into(),
                service: Some("a\"b".into()),
                scope: None
            })
        );
    }

    proptest::proptest! {
        #[test]
        fn parsing_never_panics(text in "[ -~]{0,80}") {
            let _ = Challenge::parse(&format!("Bearer {text}"));
        }
    }

    #[test]
    fn secrets_stay_out_of_urls() {
        let realm = Url::parse("https://auth.example/token?a=b").unwrap();
        let scope = "repository:library/a:pull";
        let password = RegistrySecret::Password {
            username: "u".into(),
            password: "secret".into(),
        };
        let request = TokenRequest::new(&realm, Some("r"), scope, Some(&password));
        assert_eq!(
            request.url.as_str(),
            "https://auth.example/token?a=b&service=r&scope=repository%3Alibrary%2Fa%3Apull"
        );
        assert!(request.header.unwrap().is_sensitive());
        let identity = RegistrySecret::IdentityToken("secret".into());
        let request = TokenRequest::new(&realm, None, scope, Some(&identity));
        assert!(!request.url.as_str().contains("secret"));
        assert!(request.form.unwrap().ends_with("refresh_token=secret"));
    }
}
