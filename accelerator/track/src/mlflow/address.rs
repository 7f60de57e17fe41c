//! Addresses of servers.

use std::net::IpAddr;

use percent_encoding::percent_decode_str;

use crate::error::{Error, Kind, Result};

/// The address of a server, and who asks it.
#[derive(Debug)]
pub(super) struct Address {
    /// Without a slash at its end.
    pub(super) without_user: String,
    /// Whether it is a loopback address.
    pub(super) is_this_host: bool,
    /// With a password.
    pub(super) user: Option<(String, String)>,
}

impl Address {
    pub(super) fn parse(address: &str) -> Result<Self> {
        let misuse = |message: String| Err(Error::new(Kind::Misuse, message));
        let Some((scheme, rest)) = address.trim().split_once("://") else {
            return misuse(format!(
                "expected the address of an MLflow server, as http://127.0.0.1:5000, found {address:?}"
            ));
        };
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        // The page of a browser is not part of it.
        let path = path.split(['?', '#']).next().unwrap_or_default();
        let (user, host) = match authority.rsplit_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, authority),
        };
        let scheme = scheme.to_ascii_lowercase();
        let without_user = format!("{scheme}://{host}{}", path.trim_end_matches('/'));
        match scheme.as_str() {
            "http" => {}
            "https" if cfg!(feature = "https") => {}
            "https" => {
                return misuse(format!(
                    "{without_user} needs https, which this program is built without; build it with the feature `https` of \
                     `burn-accelerate-track`"
                ));
            }
            _ => {
                return misuse(format!(
                    "expected the address of an MLflow server by http or https, found {without_user}; start one with \
                     `mlflow server --backend-store-uri {without_user}` if that is where runs are stored"
                ));
            }
        }
        let uri = without_user.parse::<ureq::http::Uri>().ok();
        let Some(uri) = uri.filter(|_| !host.is_empty()) else {
            return misuse(format!(
                "expected the address of an MLflow server, as http://127.0.0.1:5000, found {without_user:?}"
            ));
        };
        let name = uri.host().unwrap_or_default();
        let ip = name.trim_matches(['[', ']']).parse::<IpAddr>();
        let is_this_host =
            name.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|ip| ip.is_loopback());
        let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        let user = user.map(|user| {
            let (user, password) = user.split_once(':').unwrap_or((user, ""));
            (decoded(user), decoded(password))
        });
        Ok(Self {
            without_user,
            is_this_host,
            user,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed() {
        let address = Address::parse(" HTTP://a%40b:p%3Aw@host:1/x/ ").unwrap();
        assert_eq!(address.without_user, "http://host:1/x");
        assert_eq!(address.user, Some(("a@b".to_owned(), "p:w".to_owned())));
        assert!(!address.is_this_host);
        let page = Address::parse("http://[::1]:5000/x/#/experiments/1").unwrap();
        assert_eq!(page.without_user, "http://[::1]:5000/x");
        for this in [
            "http://[::1]:5000",
            "http://LOCALHOST",
            "http://127.0.0.2:1/x",
        ] {
            assert!(Address::parse(this).unwrap().is_this_host, "{this}");
        }
        for wrong in ["", "databricks", "file:///tmp/x", "http://", "http://a b"] {
            assert!(Address::parse(wrong).unwrap_err().is_misuse(), "{wrong}");
        }
    }

    #[cfg(not(feature = "https"))]
    #[test]
    fn https_names_its_feature() {
        let error = Address::parse("https://me:secret@host").unwrap_err();
        assert!(error.is_misuse());
        assert!(error.to_string().contains("feature `https`"), "{error}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}
