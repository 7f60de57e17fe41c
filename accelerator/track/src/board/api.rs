//! What the board answers.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use super::request::Request;
use super::response::Response;
use super::watched::{RunChanges, WatchedRuns};
use crate::blob::blob_path;
use crate::report::{MOST_POINTS, Page, PageColumns, image_type, page, points_of, read_image};

/// Routes requests, of which only those with the token are answered.
#[derive(Debug)]
pub(super) struct Api {
    runs: Arc<WatchedRuns>,
    hosts: [String; 3],
    cookie: String,
    token: String,
}

impl Api {
    pub(super) fn new(runs: Arc<WatchedRuns>, port: u16, token: String) -> Self {
        Self {
            runs,
            hosts: ["127.0.0.1", "localhost", "[::1]"].map(|host| format!("{host}:{port}")),
            // Cookies know no ports.
            cookie: format!("accel-board-{port}"),
            token,
        }
    }

    pub(super) fn answer(&self, request: &Request) -> Response {
        // A page elsewhere may let a name of its own point to this machine.
        if !self.hosts.contains(&request.host) {
            return Response::text(421, "The board answers on this machine's own names alone.");
        }
        let cookies = request.cookies.iter();
        let mut tokens = cookies
            .filter(|(name, _)| *name == self.cookie)
            .map(|(_, token)| token.as_str())
            .chain(request.query("token"));
        if !tokens.any(|token| is_same(token, &self.token)) {
            return Response::text(403, "The address needs the token that the board printed.");
        }
        let answer = match request.path.as_str() {
            "/" => Some(self.page()),
            "/api/runs" => Some(self.list(request)),
            "/api/series" => self.series(request),
            "/api/run" => self.run(request),
            "/api/blob" => self.blob(request),
            "/api/trace" => self.trace(request),
            _ => None,
        };
        answer.unwrap_or_else(|| Response::text(404, "There is no such thing."))
    }

    fn page(&self) -> Response {
        let title = self.runs.title();
        let html = page(&Page::Board {
            title: &title,
            token: &self.token,
        });
        let cookie = format!(
            "{}={}; Path=/; HttpOnly; SameSite=Strict",
            self.cookie, self.token
        );
        Response::html(html).with("Set-Cookie", cookie)
    }

    fn list(&self, request: &Request) -> Response {
        let since = request.query("since").and_then(|x| x.parse().ok());
        let changes: RunChanges = self.runs.changes(since.unwrap_or(0));
        Response::json(&changes)
    }

    fn series(&self, request: &Request) -> Option<Response> {
        let key = request.query("key")?;
        let runs = match request.query("runs") {
            Some(list) => list.split(',').filter_map(|i| i.parse().ok()).collect(),
            None => self.runs.numbers(),
        };
        let points = request.query("points").and_then(|x| x.parse().ok());
        let points = points.unwrap_or_else(|| points_of(self.runs.numbers().len()));
        let found = runs.into_iter().filter_map(|i| {
            let columns = self
                .runs
                .get(i)?
                .columns(key)?
                .thinned(points.min(MOST_POINTS));
            Some(PageColumns { run: i, columns })
        });
        let found: Vec<PageColumns> = found.collect();
        Some(Response::json(&found))
    }

    fn run(&self, request: &Request) -> Option<Response> {
        let run = self.runs.get(request.query("id")?.parse().ok()?)?;
        Some(Response::json(run.detail()))
    }

    fn blob(&self, request: &Request) -> Option<Response> {
        let run = self.runs.get(request.query("run")?.parse().ok()?)?;
        let bytes = read_image(&blob_path(run.folder(), request.query("hash")?)?)?;
        Some(Response::image(image_type(&bytes)?, bytes))
    }

    fn trace(&self, request: &Request) -> Option<Response> {
        let run = self.runs.get(request.query("run")?.parse().ok()?)?;
        let path = run.detail().trace(request.query("name")?)?;
        let file = File::open(Path::new(path)).ok()?;
        let length = file.metadata().ok()?.len();
        Some(Response::saved(file, length))
    }
}

/// Whether two words are the same, in a time that does not tell where they differ.
fn is_same(a: &str, b: &str) -> bool {
    let differences = a
        .bytes()
        .zip(b.bytes())
        .fold(0, |sum, (a, b)| sum | (a ^ b));
    a.len() == b.len() && std::hint::black_box(differences) == 0
}
