//! Connections: a thread each, and not too many.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::api::Api;
use super::request::{Refusal, Request};
use super::response::Response;
use crate::error::Result;

/// Answers the connections of a listener.
#[derive(Debug)]
pub(super) struct Server {
    listener: TcpListener,
    api: Arc<Api>,
    open: Arc<AtomicUsize>,
}

impl Server {
    pub(super) fn new(listener: TcpListener, api: Api) -> Self {
        Self {
            listener,
            api: Arc::new(api),
            open: Arc::default(),
        }
    }

    /// Does not return.
    pub(super) fn serve(&self) -> Result<()> {
        loop {
            let Ok((stream, _)) = self.listener.accept() else {
                // Too many files are open: some will be closed.
                thread::sleep(Duration::from_millis(50));
                continue;
            };
            let place = OpenConnection::take(&self.open);
            let api = Arc::clone(&self.api);
            let connection = thread::Builder::new().name("board-connection".to_owned());
            // Without a thread the connection is closed, and the browser asks again.
            let _ = connection.spawn(move || {
                let answered = answer(stream, &api, place.is_some());
                if let Err(error) = answered {
                    tracing::debug!(%error, "a browser went away");
                }
                drop(place);
            });
        }
    }
}

/// How many connections are open at a time. A browser opens six.
const MOST: usize = 64;

/// One of the connections that may be open.
#[derive(Debug)]
struct OpenConnection(Arc<AtomicUsize>);

impl OpenConnection {
    fn take(open: &Arc<AtomicUsize>) -> Option<Self> {
        let place = Self(Arc::clone(open));
        // A place that is one too many is given back as it is dropped.
        (open.fetch_add(1, Ordering::AcqRel) < MOST).then_some(place)
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn answer(mut stream: TcpStream, api: &Api, has_place: bool) -> io::Result<()> {
    if !has_place {
        let busy = Response::text(503, "Too many connections are open. Try again.");
        return busy.send(&mut stream);
    }
    let response = match Request::read(&mut stream)? {
        None => return Ok(()),
        Some(Ok(request)) => api.answer(&request),
        Some(Err(Refusal(status, words))) => Response::text(status, words),
    };
    response.send(&mut stream)
}
