//! Requests to an MLflow server.

use std::fs::File;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;
use std::{fmt, thread};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde_json::Value;
use ureq::http::{Method, Request, Response, StatusCode};
use ureq::{Agent, AsSendBody, Body};

use crate::error::{Error, Kind, Result};
use crate::sink::http_config;

/// An MLflow server: its address, and who asks it.
///
/// Each request ends: a connection is made within 5 seconds, an answer comes within 30. If the server is busy or the
/// connection breaks, a request is sent again a few times.
///
/// ```
/// use accelerator_track::MlflowServer;
///
/// let server = MlflowServer::new("http://me:secret@127.0.0.1:5000/")?;
/// assert_eq!(server.address(), "http://127.0.0.1:5000");
/// assert!(!format!("{server:?}").contains("secret"));
/// assert!(MlflowServer::new("sqlite:///mlflow.db").unwrap_err().is_misuse());
/// # Ok::<(), accelerator_track::Error>(())
/// ```
#[derive(Clone)]
pub struct MlflowServer {
    address: String,
    /// The value of the header.
    authorization: Option<String>,
    timeout: Duration,
    agent: Agent,
}

impl MlflowServer {
    /// A server at an address, as `http://127.0.0.1:5000`. It may hold a user and a password, as
    /// `http://user:password@host`. Nothing is sent yet.
    ///
    /// # Errors
    ///
    /// If the address is not of http or https. The feature `https` is needed for the latter.
    pub fn new(address: &str) -> Result<Self> {
        let parsed = Address::parse(address)?;
        let server = Self {
            address: parsed.without_user,
            authorization: None,
            timeout: REQUEST_TIMEOUT,
            agent: agent(parsed.is_this_host),
        };
        Ok(match parsed.user {
            Some((user, password)) => server.with_password(&user, &password),
            None => server,
        })
    }

    /// The server that MLflow's own variables name: `MLFLOW_TRACKING_URI`, and `MLFLOW_TRACKING_USERNAME` with
    /// `MLFLOW_TRACKING_PASSWORD`, or `MLFLOW_TRACKING_TOKEN`.
    ///
    /// # Errors
    ///
    /// If `MLFLOW_TRACKING_URI` is not set, or is not the address of a server.
    pub fn from_env() -> Result<Self> {
        let Some(address) = variable("MLFLOW_TRACKING_URI") else {
            let message =
                "no MLflow server is named; set MLFLOW_TRACKING_URI, as http://127.0.0.1:5000";
            return Err(Error::new(Kind::Misuse, message));
        };
        let server = Self::new(&address)?;
        let user = variable("MLFLOW_TRACKING_USERNAME");
        let password = variable("MLFLOW_TRACKING_PASSWORD");
        Ok(match (user, password, variable("MLFLOW_TRACKING_TOKEN")) {
            (Some(user), Some(password), _) => server.with_password(&user, &password),
            (_, _, Some(token)) => server.with_token(&token),
            _ => server,
        })
    }

    /// Asks with a bearer token.
    #[must_use]
    pub fn with_token(self, token: &str) -> Self {
        let authorization = Some(format!("Bearer {token}"));
        Self {
            authorization,
            ..self
        }
    }

    /// Its address, without a user.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    fn with_password(self, user: &str, password: &str) -> Self {
        let credentials = BASE64_STANDARD.encode(format!("{user}:{password}"));
        let authorization = Some(format!("Basic {credentials}"));
        Self {
            authorization,
            ..self
        }
    }

    #[cfg(test)]
    pub(super) fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    pub(super) fn get(&self, call: &str, query: &[(&str, &str)]) -> Result<Value, Failure> {
        let mut url = self.url_of(call);
        for (at, (key, value)) in query.iter().enumerate() {
            let separator = if at == 0 { '?' } else { '&' };
            url.push_str(&format!("{separator}{key}={}", encode(value)));
        }
        again_while_busy(|| self.send(Method::GET, &url, call, ()))
    }

    /// Posts a request that may be sent twice, again while the server is busy.
    pub(super) fn post(&self, call: &str, body: &Value) -> Result<Value, Failure> {
        again_while_busy(|| self.post_once(call, body))
    }

    pub(super) fn post_once(&self, call: &str, body: &Value) -> Result<Value, Failure> {
        self.send(Method::POST, &self.url_of(call), call, body.to_string())
    }

    /// Looks for what a request creates, and sends the request if it does not exist. If no answer comes, it looks
    /// again, since the server may have acted.
    pub(super) fn create_once<T>(
        &self,
        mut find: impl FnMut() -> Result<Option<T>>,
        call: &str,
        body: &Value,
        read: impl Fn(&Value) -> Result<T>,
    ) -> Result<T> {
        again_while_busy(|| match find()? {
            Some(found) => Ok(found),
            None => Ok(read(&self.post_once(call, body)?)?),
        })
        .map_err(Error::from)
    }

    /// Stores an artifact; `path` counts from the server's artifacts.
    pub(super) fn put_bytes(&self, path: &str, mime: &str, bytes: &[u8]) -> Result<(), Failure> {
        let url = self.artifact_url(path);
        again_while_busy(|| self.put_once(&url, mime, bytes, bytes.len() as u64))
    }

    pub(super) fn put_file(&self, path: &str, file: &Path) -> Result<(), Failure> {
        let url = self.artifact_url(path);
        again_while_busy(|| {
            let opened = File::open(file).map_err(|error| Error::io("read", file, error))?;
            let read = opened.metadata();
            let size = read.map_err(|error| Error::io("read", file, error))?.len();
            self.put_once(&url, "application/octet-stream", opened, size)
        })
    }

    fn put_once(
        &self,
        url: &str,
        mime: &str,
        body: impl AsSendBody,
        size: u64,
    ) -> Result<(), Failure> {
        let request = self.request(Method::PUT, url).header("content-type", mime);
        let request = request.body(body).map_err(|error| unsendable(&error))?;
        // The server copies what it got before it answers.
        let copied = Duration::from_secs(size / COPIED_PER_SECOND);
        let request = self
            .agent
            .configure_request(request)
            .timeout_per_read(Some(self.timeout))
            .timeout_per_write(Some(self.timeout))
            .timeout_recv_response(Some(self.timeout + copied))
            .build();
        self.answer(self.agent.run(request), "PUT", "mlflow-artifacts")
            .map(|_| ())
    }

    fn send(
        &self,
        method: Method,
        url: &str,
        call: &str,
        body: impl AsSendBody,
    ) -> Result<Value, Failure> {
        let name = method.to_string();
        let request = self.request(method, url);
        let request = request
            .header("content-type", "application/json")
            .body(body)
            .map_err(|error| unsendable(&error))?;
        let request = self
            .agent
            .configure_request(request)
            .timeout_global(Some(self.timeout))
            .build();
        self.answer(self.agent.run(request), &name, call)
    }

    fn request(&self, method: Method, url: &str) -> ureq::http::request::Builder {
        let request = Request::builder().method(method).uri(url);
        match &self.authorization {
            Some(authorization) => request.header("authorization", authorization),
            None => request,
        }
    }

    fn answer(
        &self,
        answer: Result<Response<Body>, ureq::Error>,
        method: &str,
        call: &str,
    ) -> Result<Value, Failure> {
        let asked = format!("{method} {call}");
        let lost = |error: ureq::Error| self.lost(&asked, error);
        let mut answer = answer.map_err(lost)?;
        let status = answer.status();
        let body = answer.body_mut().with_config().limit(LONGEST_ANSWER);
        let body = body.read_to_vec().map_err(lost)?;
        // A file that was stored is answered with nothing.
        let parsed: Option<Value> = match body.is_empty() {
            true => Some(Value::Null),
            false => serde_json::from_slice(&body).ok(),
        };
        if status.is_success()
            && let Some(value @ (Value::Object(_) | Value::Null)) = parsed
        {
            return Ok(value);
        }
        let address = &self.address;
        let shown = status.as_u16();
        let code = parsed.as_ref().and_then(|value| text(value, "error_code"));
        let (cause, said) = match (code, &parsed) {
            (Some(code), Some(value)) => {
                let message = text(value, "message").unwrap_or_default();
                let said = format!("{}{code}: {}", advice(status), beginning(message));
                (Cause::Refused(code.to_owned()), said)
            }
            _ => {
                let begins = beginning(&String::from_utf8_lossy(&body));
                let said = match status {
                    StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                        format!("{}{begins}", advice(status))
                    }
                    StatusCode::PAYLOAD_TOO_LARGE => {
                        format!("it, or a proxy before it, takes no file of this size: {begins}")
                    }
                    _ if status.is_redirection() => {
                        let to = answer.headers().get("location");
                        let to = to.and_then(|to| to.to_str().ok()).unwrap_or("elsewhere");
                        format!("it sends to {to}; give that address")
                    }
                    _ if status.is_server_error() => begins,
                    _ => format!(
                        "expected JSON of MLflow's REST API 2.0; is there an MLflow server at this address? It says: {begins}"
                    ),
                };
                (Cause::Nonsense, said)
            }
        };
        let cause = match status {
            StatusCode::PAYLOAD_TOO_LARGE => Cause::TooLarge,
            _ if BUSY.contains(&shown) => Cause::Busy,
            _ => cause,
        };
        let message = format!("MLflow at {address} answers {asked} with {shown}: {said}");
        let kind = match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Kind::Denied,
            _ => Kind::Remote,
        };
        Err(Failure {
            cause,
            error: Error::new(kind, message),
        })
    }

    fn lost(&self, asked: &str, error: ureq::Error) -> Failure {
        let address = &self.address;
        let (cause, said) = match &error {
            ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
                let seconds = CONNECT_TIMEOUT.as_secs();
                (Cause::Slow, format!("no connection within {seconds} s"))
            }
            ureq::Error::Timeout(_) => {
                let seconds = self.timeout.as_secs_f64();
                (Cause::Slow, format!("no answer within {seconds} s"))
            }
            ureq::Error::Protocol(_) => {
                let said = "the answer is not HTTP; is there an MLflow server at this address?";
                (Cause::Nonsense, format!("{said} {error}"))
            }
            _ => (Cause::Lost, error.to_string()),
        };
        let message = format!("MLflow at {address} cannot be asked for {asked}: {said}");
        Failure {
            cause,
            error: Error::new(Kind::Remote, message).with_source(error),
        }
    }

    fn url_of(&self, call: &str) -> String {
        format!("{}/api/2.0/mlflow/{call}", self.address)
    }

    fn artifact_url(&self, path: &str) -> String {
        let path = utf8_percent_encode(path, PATH);
        format!("{}/api/2.0/mlflow-artifacts/artifacts/{path}", self.address)
    }
}

impl fmt::Debug for MlflowServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MlflowServer")
            .field("address", &self.address)
            .field("has_credentials", &self.authorization.is_some())
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// The failure of a request.
#[derive(Debug)]
pub(super) struct Failure {
    cause: Cause,
    error: Error,
}

impl Failure {
    /// The error of MLflow that the server named, as `RESOURCE_DOES_NOT_EXIST`.
    pub(super) fn is(&self, code: &str) -> bool {
        matches!(&self.cause, Cause::Refused(found) if found == code)
    }

    /// Returns true if the server, or a proxy before it, refuses the content that was sent.
    pub(super) fn is_of_content(&self) -> bool {
        self.cause == Cause::TooLarge || self.is("INVALID_PARAMETER_VALUE")
    }

    /// Returns true if the failure is on this side: a file cannot be read.
    pub(super) fn is_here(&self) -> bool {
        self.cause == Cause::Here
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        failure.error
    }
}

/// A failure on this side; asking again does not help.
impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self {
            cause: Cause::Here,
            error,
        }
    }
}

/// A member of an answer that every version of the server sends.
pub(super) fn member<'a>(answer: &'a Value, pointer: &str) -> Result<&'a str> {
    answer.pointer(pointer).and_then(Value::as_str).ok_or_else(|| {
        let found = beginning(&answer.to_string());
        Error::new(
            Kind::Remote,
            format!("expected a string at {pointer} of MLflow's answer, found {found}; is it another version of the server?"),
        )
    })
}

/// Tries it a few times while the server is busy or the connection breaks.
fn again_while_busy<T>(mut ask: impl FnMut() -> Result<T, Failure>) -> Result<T, Failure> {
    for pause in PAUSES {
        match ask() {
            Err(Failure {
                cause: Cause::Busy | Cause::Lost,
                ..
            }) => thread::sleep(pause),
            result => return result,
        }
    }
    ask()
}

#[derive(Debug, Eq, PartialEq)]
enum Cause {
    /// The server did not act, and says why.
    Refused(String),
    /// It takes no body of this length.
    TooLarge,
    /// It may act when it is asked again.
    Busy,
    /// The connection broke; the server may have acted.
    Lost,
    /// No answer came in time; the server may have acted, or will.
    Slow,
    /// The answer is not MLflow's.
    Nonsense,
    /// A file cannot be read, a header cannot be sent.
    Here,
}

/// Proxies are those of the environment. None leads to a server on this host.
fn agent(is_this_host: bool) -> Agent {
    let config = http_config();
    let config = match is_this_host {
        true => config.proxy(None),
        false => config,
    };
    config
        .timeout_resolve(Some(CONNECT_TIMEOUT))
        .timeout_connect(Some(CONNECT_TIMEOUT))
        // The server closes what is idle for 5 seconds.
        .max_idle_age(Duration::from_secs(3))
        .build()
        .new_agent()
}

/// Returns advice about a status, to stand before the server's text.
fn advice(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            "it does not let this user in; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or \
             MLFLOW_TRACKING_TOKEN: "
        }
        _ => "",
    }
}

fn unsendable(error: &ureq::http::Error) -> Failure {
    let message = format!(
        "a request to MLflow cannot be sent: {error}; is there a line break in a token or a password?"
    );
    Error::new(Kind::Misuse, message).into()
}

fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key).and_then(Value::as_str)
}

fn variable(name: &str) -> Option<String> {
    accelerator_host::variable(name)?.into_string().ok()
}

fn encode(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// Shortens a text that may be a page.
fn beginning(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(200) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

const PATH: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');
const BUSY: [u16; 6] = [408, 429, 500, 502, 503, 504];
const PAUSES: [Duration; 3] = [
    Duration::from_millis(100),
    Duration::from_millis(400),
    Duration::from_millis(1600),
];
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// 64 MiB.
const LONGEST_ANSWER: u64 = 1 << 26;
/// 16 MiB.
const COPIED_PER_SECOND: u64 = 1 << 24;

/// The address of a server, and who asks it.
#[derive(Debug)]
pub(super) struct Address {
    /// The address without the user, and without a slash at its end.
    pub(super) without_user: String,
    /// True for a loopback address.
    pub(super) is_this_host: bool,
    /// The user and the password.
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
    fn a_line_break_in_a_token_is_misuse() {
        let server = MlflowServer::new("http://127.0.0.1:1").unwrap();
        let failure = server.with_token("a\nb").get("x", &[]).unwrap_err();
        assert!(Error::from(failure).is_misuse());
    }

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
        crate::tests::assert_says(&error, "feature `https`");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}
