//! An answer to a browser.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::Serialize;

/// A status, headers and a body.
#[derive(Debug)]
pub(super) struct Response {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Body,
}

#[derive(Debug)]
enum Body {
    Bytes(Vec<u8>),
    File(File, u64),
}

impl Response {
    pub(super) fn text(status: u16, text: &str) -> Self {
        Self::bytes(
            status,
            "text/plain; charset=utf-8",
            format!("{text}\n").into(),
        )
    }

    pub(super) fn html(page: String) -> Self {
        Self::bytes(200, "text/html; charset=utf-8", page.into())
    }

    pub(super) fn json(value: &impl Serialize) -> Self {
        match serde_json::to_vec(value) {
            Ok(json) => Self::bytes(200, "application/json", json),
            Err(error) => Self::text(500, &error.to_string()),
        }
    }

    pub(super) fn image(mime: &str, bytes: Vec<u8>) -> Self {
        Self::bytes(200, mime, bytes)
    }

    /// A file of JSON that the browser saves.
    pub(super) fn saved(file: File, length: u64) -> Self {
        let mut this = Self::bytes(200, "application/json", Vec::new());
        this.body = Body::File(file, length);
        this.with("Content-Disposition", "attachment".to_owned())
    }

    pub(super) fn with(mut self, header: &'static str, value: String) -> Self {
        self.headers.push((header, value));
        self
    }

    /// Sends it, within a time that a browser on this machine never needs.
    pub(super) fn send(self, stream: &mut TcpStream) -> io::Result<()> {
        let (length, mut body): (u64, Box<dyn Read>) = match self.body {
            Body::Bytes(bytes) => (bytes.len() as u64, Box::new(io::Cursor::new(bytes))),
            Body::File(file, length) => (length, Box::new(file.take(length))),
        };
        let mut head = format!(
            "HTTP/1.1 {} {}\r\nContent-Length: {length}\r\nConnection: close\r\n",
            self.status,
            reason(self.status)
        );
        for (name, value) in ALWAYS {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        let deadline = Instant::now() + SEND_TIME;
        stream.set_write_timeout(Some(SEND_TIME))?;
        stream.write_all(head.as_bytes())?;
        let mut chunk = vec![0; 64 * 1024];
        loop {
            let read = body.read(&mut chunk)?;
            if read == 0 {
                return stream.flush();
            }
            if Instant::now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            stream.write_all(&chunk[..read])?;
        }
    }

    fn bytes(status: u16, mime: &str, bytes: Vec<u8>) -> Self {
        Self {
            status,
            headers: vec![("Content-Type", mime.to_owned())],
            body: Body::Bytes(bytes),
        }
    }
}

const SEND_TIME: Duration = Duration::from_secs(60);

/// Nothing is kept, shown within another page, or told to another.
const ALWAYS: [(&str, &str); 6] = [
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", "frame-ancestors 'none'"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
];

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        421 => "Misdirected Request",
        431 => "Request Header Fields Too Large",
        503 => "Service Unavailable",
        _ => "Internal Server Error",
    }
}
