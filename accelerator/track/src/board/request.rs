//! A request of a browser.

use std::io::{self, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use percent_encoding::percent_decode_str;

/// A `GET`, as far as the board looks at it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Request {
    pub(super) path: String,
    pub(super) query: Vec<(String, String)>,
    pub(super) host: String,
    pub(super) cookies: Vec<(String, String)>,
}

/// Why there is no [`Request`]: the status to answer with, and what to say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Refusal(pub(super) u16, pub(super) &'static str);

impl Request {
    /// Reads a request's head. `None` where the browser went away, or took too long.
    pub(super) fn read(stream: &mut TcpStream) -> io::Result<Option<Result<Self, Refusal>>> {
        let deadline = Instant::now() + HEAD_TIME;
        let mut head = Vec::new();
        let mut chunk = [0; 4096];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            stream.set_read_timeout(Some(left))?;
            match stream.read(&mut chunk)? {
                0 => return Ok(None),
                read => head.extend_from_slice(&chunk[..read]),
            }
            if let Some(request) = Self::parse(&head) {
                return Ok(Some(request));
            }
            if head.len() >= LONGEST_HEAD {
                return Ok(Some(Err(Refusal(431, "The request is too long."))));
            }
        }
    }

    /// `None` while the head is not complete.
    pub(super) fn parse(head: &[u8]) -> Option<Result<Self, Refusal>> {
        let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut parsed = httparse::Request::new(&mut headers);
        match parsed.parse(head) {
            Ok(status) if status.is_partial() => return None,
            Ok(_) => {}
            Err(httparse::Error::TooManyHeaders) => {
                return Some(Err(Refusal(431, "The request has too many headers.")));
            }
            Err(_) => return Some(Err(Refusal(400, "This is no HTTP request."))),
        }
        if parsed.method != Some("GET") {
            return Some(Err(Refusal(405, "Only GET is answered.")));
        }
        let mut request = Self::default();
        let target = parsed.path.unwrap_or_default();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        request.path = path.to_owned();
        request.query = query
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| (decoded(key), decoded(value)))
            .collect();
        for header in parsed.headers.iter() {
            let value = String::from_utf8_lossy(header.value);
            if header.name.eq_ignore_ascii_case("host") {
                if !request.host.is_empty() {
                    return Some(Err(Refusal(400, "The request names two hosts.")));
                }
                request.host = value.trim().to_ascii_lowercase();
            } else if header.name.eq_ignore_ascii_case("cookie") {
                let pairs = value
                    .split(';')
                    .filter_map(|pair| pair.trim().split_once('='));
                request
                    .cookies
                    .extend(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())));
            }
        }
        Some(Ok(request))
    }

    /// The value of a key of the query.
    pub(super) fn query(&self, key: &str) -> Option<&str> {
        let mut found = self.query.iter().filter(|(name, _)| name == key);
        found.next().map(|(_, value)| value.as_str())
    }
}

const HEAD_TIME: Duration = Duration::from_secs(5);
const LONGEST_HEAD: usize = 16 * 1024;
const MOST_HEADERS: usize = 64;

/// Text from a query: `%41` is a byte, `+` a space.
fn decoded(text: &str) -> String {
    let text = text.replace('+', " ");
    percent_decode_str(&text).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_parsed() {
        let head = b"GET /api/series?key=train%2Fl%C3%B6ss+1&runs=0,1&x HTTP/1.1\r\nHost: LocalHost:80\r\nCookie: a=b; c=d=e\r\n\r\n";
        let request = Request::parse(head).unwrap().unwrap();
        assert_eq!(request.path, "/api/series");
        assert_eq!(request.query("key"), Some("train/löss 1"));
        assert_eq!(request.query("none"), None);
        assert_eq!(request.host, "localhost:80");
        assert_eq!(request.cookies[1], ("c".to_owned(), "d=e".to_owned()));
        for end in 0..head.len() {
            assert_eq!(Request::parse(&head[..end]), None, "cut at {end}");
        }
    }

    #[test]
    fn what_is_no_request_is_refused() {
        let status = |head: &str| Request::parse(head.as_bytes()).unwrap().unwrap_err().0;
        assert_eq!(status("POST / HTTP/1.1\r\n\r\n"), 405);
        assert_eq!(status("\x16\x03\x01\x02"), 400);
        assert_eq!(status("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"), 400);
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(65));
        assert_eq!(status(&many), 431);
    }

    #[test]
    fn odd_escapes_stay_as_they_are() {
        for (text, expected) in [
            ("%", "%"),
            ("%4", "%4"),
            ("%zz", "%zz"),
            ("a%2", "a%2"),
            ("%41b", "Ab"),
        ] {
            assert_eq!(decoded(text), expected);
        }
    }
}
