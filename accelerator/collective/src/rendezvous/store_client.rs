//! A rank's open connection to the store.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    net::{Shutdown, TcpStream},
    sync::{Arc, Weak},
    thread,
    time::{Duration, Instant},
};

use super::{StoreHost, StoreServer, store_state::RankMessage};
use crate::{
    error::{Certainty, Culprit, Error, Kind, Result, Seconds},
    liveness::{store_interval, suspended_for},
    wire::{
        WireError,
        message::{MAX_MESSAGE_RANKS, MAX_TABLE_BYTES, MAX_TEXT_BYTES, Message, OpRecord},
        shorten,
    },
};
use accelerator_host::sync::{Condvar, Mutex};

/// A live connection to the store, for as long as the group lives: the store reports what it has seen, and this rank
/// reports its failures. Handles are cheap to clone. The connection ends with the last one, and so does the store if
/// this rank hosts it.
///
/// Nothing here waits for the store, except [`exit_notice`](Self::exit_notice) and [`next_place`](Self::next_place), up
/// to their timeouts. Once the ranks are connected, the end of the connection means nothing to them.
#[derive(Clone)]
pub(crate) struct StoreClient(Arc<ClientHandle>);

impl StoreClient {
    /// Returns a handle that does not keep the connection open.
    pub(crate) fn downgrade(&self) -> WeakStoreClient {
        WeakStoreClient(Arc::downgrade(&self.0))
    }

    /// Keeps the connection on which the table arrived.
    pub(super) fn open(
        rank: usize,
        stream: TcpStream,
        liveness: Duration,
        store: StoreLocation,
        server: Option<StoreServer>,
    ) -> Result<Self> {
        let connection = Arc::new(StoreConnection {
            stream,
            liveness,
            store,
            writer: Mutex::new(ConnectionWriter::Whole),
            known: Mutex::default(),
            changed: Condvar::new(),
            wake: Mutex::new(None),
            records: Mutex::new(None),
        });
        let listening = Arc::clone(&connection);
        thread::Builder::new()
            .name("store-client".to_owned())
            .stack_size(512 * 1024)
            .spawn(move || listening.listen())
            .map_err(|error| {
                Error::io(
                    "no thread can be started for the connection to the store",
                    error,
                )
            })?;
        Ok(Self(Arc::new(ClientHandle {
            rank,
            connection,
            server,
        })))
    }

    /// Returns the store's text about the end of a rank, which continues "rank 2 is lost: ". Waits up to `timeout` for
    /// it if a launcher hosts the store.
    pub(crate) fn exit_notice(&self, rank: usize, timeout: Duration) -> Option<String> {
        let connection = &self.0.connection;
        // Rank 0 sees only that connections end, as every rank does; a launcher sees how processes end.
        let timeout = match connection.store.host {
            StoreHost::Launcher => timeout,
            StoreHost::Rank0 => Duration::ZERO,
        };
        let waiting = |known: &mut ClientState| {
            known.end == ConnectionEnd::Open && !known.exit_notices.contains_key(&rank)
        };
        let known =
            connection
                .changed
                .wait_timeout_while(connection.known.lock(), timeout, waiting);
        known.exit_notices.get(&rank).cloned()
    }

    /// Tells the store how this rank's group failed: the rank that the error blames (or this one), and the error's
    /// text.
    pub(crate) fn report_failure(&self, error: &Error) {
        // Before the ranks are connected, the store already knows a failure that it reported itself.
        let told = {
            let known = self.0.connection.known.lock();
            !known.connected && known.connect_failure.is_some()
        };
        if !told {
            self.send(
                RankMessage::ReportFailure(error.clone()),
                &Message::ReportFailure(WireError::bounded(
                    error,
                    MAX_TEXT_BYTES,
                    MAX_MESSAGE_RANKS,
                )),
            );
        }
    }

    /// Takes the oldest exit notice that was not taken before: the rank and the text.
    pub(crate) fn next_exit_notice(&self) -> Option<(usize, String)> {
        self.0.connection.known.lock().unread_notices.pop_front()
    }

    /// Returns `true` if the store has told this rank's place in the next group, and it is `wanted`.
    pub(crate) fn has_next_place(&self, wanted: impl Fn(&[(String, String)]) -> bool) -> bool {
        let known = self.0.connection.known.lock();
        known.next_place.as_ref().is_some_and(|place| wanted(place))
    }

    /// Waits for the launch variables of that place and takes them; they are empty if this rank has no place in the
    /// next group. Discards a place that is not `wanted`.
    pub(crate) fn next_place(
        &self,
        timeout: Duration,
        wanted: impl Fn(&[(String, String)]) -> bool,
    ) -> Option<Vec<(String, String)>> {
        let connection = &self.0.connection;
        let waiting = |known: &mut ClientState| {
            let is_wanted = known.next_place.as_ref().is_some_and(|place| wanted(place));
            known.end == ConnectionEnd::Open && !is_wanted
        };
        let mut known =
            connection
                .changed
                .wait_timeout_while(connection.known.lock(), timeout, waiting);
        known.next_place.take_if(|place| wanted(place))
    }

    /// Calls `wake` on the reading thread after every message that changes the state: there may be an
    /// [exit notice](Self::next_exit_notice). Calls it once before returning; a later call
    /// replaces the callback.
    pub(crate) fn on_event(&self, wake: impl Fn() + Send + Sync + 'static) {
        let wake: Wake = Arc::new(wake);
        *self.0.connection.wake.lock() = Some(Arc::clone(&wake));
        wake();
    }

    /// Answers the store, whenever it asks for the last operations of this rank.
    pub(crate) fn on_records_asked(
        &self,
        records: impl Fn() -> Vec<OpRecord> + Send + Sync + 'static,
    ) {
        *self.0.connection.records.lock() = Some(Arc::new(records));
    }

    /// Tells the store the last operations of this rank, because its group fails.
    pub(crate) fn report_records(&self, records: Vec<OpRecord>) {
        self.0.connection.send(&Message::Records(records));
    }

    pub(crate) fn leave(&self) {
        self.send(RankMessage::Leave, &Message::Leave);
    }

    /// Tells the store that this rank is connected to all others. From then on the store judges nobody, and its end
    /// means nothing.
    pub(crate) fn connected(&self) {
        self.0.connection.known.lock().connected = true;
        self.send(RankMessage::Connected, &Message::Connected);
    }

    /// The reason why the ranks cannot become connected, as far as the store knows.
    pub(crate) fn connect_failure(&self) -> Option<Error> {
        self.0.connection.known.lock().connect_failure.clone()
    }

    /// Cuts the connection, as a broken network would.
    pub(crate) fn inject_disconnect(&self) {
        // It may be closed already.
        let _ = self.0.connection.stream.shutdown(Shutdown::Both);
    }

    fn send(&self, said: RankMessage, message: &Message) {
        match &self.0.server {
            // What this rank says last must be known before its store ends.
            Some(server) => server.message(self.0.rank, said),
            None => self.0.connection.send(message),
        }
    }
}

impl fmt::Debug for StoreClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreClient")
            .field("rank", &self.0.rank)
            .field("store", &self.0.connection.store)
            .finish_non_exhaustive()
    }
}

/// The address of a store and its host.
#[derive(Debug)]
pub(super) struct StoreLocation {
    /// `host:port`.
    pub(super) address: String,
    pub(super) host: StoreHost,
    /// The host and the id of the process, once they are known.
    pub(super) store_process: Option<(String, u32)>,
}

impl StoreLocation {
    /// The error of a rank that has lost the store and still needs it.
    pub(super) fn error(&self, what: impl fmt::Display) -> Error {
        let text = format!("{self} {what}");
        match (self.host, &self.store_process) {
            (StoreHost::Launcher, _) => Error::rendezvous(text),
            (StoreHost::Rank0, None) => Error::about(Kind::PeerLost, vec![0], text),
            (StoreHost::Rank0, Some((host, pid))) => {
                let culprit = Culprit {
                    rank: 0,
                    host: host.clone(),
                    pid: Some(*pid),
                    cause: format!("the store that it hosts {what}"),
                    certainty: Certainty::Settled,
                };
                Error::blaming(Kind::PeerLost, culprit, text)
            }
        }
    }
}

impl fmt::Display for StoreLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = match self.host {
            StoreHost::Launcher => "the launcher",
            StoreHost::Rank0 => "rank 0",
        };
        write!(f, "the store at {}, hosted by {host}", self.address)?;
        match &self.store_process {
            Some((host, pid)) => write!(f, " (process {pid} on {host}),"),
            None => f.write_str(","),
        }
    }
}

/// Heartbeats in both directions: when the next one is due, and for how long nothing has come from the
/// other side. Time in which this side itself was stopped does not count.
#[derive(Debug)]
pub(super) struct HeartbeatTimer {
    liveness: Duration,
    heard: Instant,
    beat: Instant,
    /// The time at which this side was to look again.
    expected: Instant,
    /// The time at which this side looked.
    looked_at: Instant,
}

impl HeartbeatTimer {
    pub(super) fn new(liveness: Duration) -> Self {
        let now = Instant::now();
        Self {
            liveness,
            heard: now,
            beat: now,
            expected: now,
            looked_at: now,
        }
    }

    pub(super) fn pause(&mut self) -> Duration {
        let now = Instant::now();
        self.expected = self.next();
        self.expected.saturating_duration_since(now)
    }

    pub(super) fn on_received(&mut self) {
        self.heard = Instant::now();
    }

    /// Checks if a heartbeat is due, which then counts as sent.
    pub(super) fn is_due(&mut self) -> bool {
        let now = Instant::now();
        if suspended_for(Some(self.expected), now, self.liveness).is_some() {
            self.heard = now;
        }
        self.looked_at = now;
        let due = now >= self.next();
        if due {
            self.beat = now;
        }
        due
    }

    /// Returns how long nothing had come when [`is_due`](Self::is_due) looked, if that is too long. The next look
    /// notices a suspension since then.
    pub(super) fn silence(&self) -> Option<Duration> {
        let silence = self.looked_at.saturating_duration_since(self.heard);
        (silence > self.liveness).then_some(silence)
    }

    fn next(&self) -> Instant {
        self.beat + store_interval(self.liveness)
    }
}

/// A handle to a [`StoreClient`] that does not keep the connection open.
#[derive(Clone, Default)]
pub(crate) struct WeakStoreClient(Weak<ClientHandle>);

impl WeakStoreClient {
    /// Returns `true` if the client still exists, and the launcher has told this rank something about a next group that
    /// nobody has taken yet.
    pub(super) fn has_next_place(&self) -> bool {
        let client = self.0.upgrade().map(StoreClient);
        client.is_some_and(|client| client.has_next_place(|_| true))
    }
}

impl fmt::Debug for WeakStoreClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeakStoreClient")
    }
}

/// The state that all clones of a client share; dropping it ends the connection.
struct ClientHandle {
    rank: usize,
    connection: Arc<StoreConnection>,
    /// The store, if this rank hosts it.
    server: Option<StoreServer>,
}

impl Drop for ClientHandle {
    fn drop(&mut self) {
        // The reading thread notices this and ends.
        let _ = self.connection.stream.shutdown(Shutdown::Both);
    }
}

struct StoreConnection {
    stream: TcpStream,
    liveness: Duration,
    store: StoreLocation,
    writer: Mutex<ConnectionWriter>,
    // Each change stands alone: it concerns one rank, or the store.
    known: Mutex<ClientState>,
    changed: Condvar,
    wake: Mutex<Option<Wake>>,
    records: Mutex<Option<RecordSource>>,
}

type Wake = Arc<dyn Fn() + Send + Sync>;

type RecordSource = Arc<dyn Fn() -> Vec<OpRecord> + Send + Sync>;

/// The state of the sending side. After a message that was not sent whole, nothing more can be sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum ConnectionWriter {
    Torn,
    Whole,
}

#[derive(Debug, Default)]
struct ClientState {
    exit_notices: BTreeMap<usize, String>,
    unread_notices: VecDeque<(usize, String)>,
    connect_failure: Option<Error>,
    connected: bool,
    next_place: Option<Vec<(String, String)>>,
    end: ConnectionEnd,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum ConnectionEnd {
    StoreClosing,
    Broken,
    #[default]
    Open,
}

impl StoreConnection {
    fn listen(&self) {
        let mut timer = HeartbeatTimer::new(self.liveness);
        loop {
            let connected = self.known.lock().connected;
            let pause = (!connected).then(|| timer.pause());
            match Message::arrives(&self.stream, pause) {
                Ok(true) => {
                    let due = Instant::now() + REST_OF_MESSAGE;
                    match Message::receive(&self.stream, MAX_TABLE_BYTES, due) {
                        Ok(message) => self.take(message),
                        Err(_) => break,
                    }
                    timer.on_received();
                }
                Ok(false) => {}
                Err(_) => break,
            }
            if connected {
                continue;
            }
            if timer.is_due() {
                self.send(&Message::Heartbeat);
            }
            if self.store.host == StoreHost::Rank0
                && let Some(silence) = timer.silence()
            {
                self.store_failed(format_args!("has been silent for {}", Seconds(silence)));
            }
        }
        {
            let mut known = self.known.lock();
            if known.end == ConnectionEnd::Open {
                known.end = ConnectionEnd::Broken;
            }
        }
        self.store_failed(format_args!("is gone"));
    }

    fn take(&self, message: Message) {
        {
            let mut known = self.known.lock();
            match message {
                Message::ExitNotice { rank, text } => known.report_exit(rank, text),
                Message::ExitInfo { rank, text } => {
                    known.exit_notices.entry(rank).or_insert(text);
                }
                Message::Refused(refusal) => {
                    let error = refusal.into_error();
                    // The store may not have heard yet that this rank is connected.
                    if known.connected && error.is_peer_lost() {
                        for &rank in error.ranks() {
                            if !known.exit_notices.contains_key(&rank) {
                                known
                                    .report_exit(rank, shorten(&error.to_string(), MAX_TEXT_BYTES));
                            }
                        }
                    }
                    known.connect_failure.get_or_insert(error);
                }
                Message::NextPlace { variables } => known.next_place = Some(variables),
                Message::StoreClosing => known.end = ConnectionEnd::StoreClosing,
                Message::AskRecords => {
                    drop(known);
                    return self.answer_with_records();
                }
                _ => return,
            }
        }
        self.wake();
    }

    /// Records that the store has failed; this matters only until the ranks are connected.
    fn store_failed(&self, what: fmt::Arguments<'_>) {
        {
            let mut known = self.known.lock();
            if !known.connected && known.end != ConnectionEnd::StoreClosing {
                let what = format_args!("{what} before the ranks were connected");
                known.connect_failure.get_or_insert(self.store.error(what));
            }
        }
        self.wake();
    }

    fn send(&self, message: &Message) {
        let mut writer = self.writer.lock();
        if *writer == ConnectionWriter::Whole && message.offer(&self.stream).is_err() {
            // A store that takes nothing is stopped or gone; this rank continues without it.
            *writer = ConnectionWriter::Torn;
        }
    }

    fn answer_with_records(&self) {
        let records = self.records.lock().clone();
        if let Some(records) = records {
            self.send(&Message::Records(records()));
        }
    }

    fn wake(&self) {
        self.changed.notify_all();
        let wake = self.wake.lock().clone();
        if let Some(wake) = wake {
            wake();
        }
    }
}

impl ClientState {
    fn report_exit(&mut self, rank: usize, text: String) {
        self.exit_notices.insert(rank, text.clone());
        self.unread_notices.push_back((rank, text));
    }
}

const REST_OF_MESSAGE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_stopped_between_a_look_and_its_verdict_blames_no_store() {
        let liveness = Duration::from_millis(400);
        let mut timer = HeartbeatTimer::new(liveness);
        timer.is_due();
        thread::sleep(2 * liveness);
        assert_eq!(timer.silence(), None);
        timer.pause();
        timer.is_due();
        assert_eq!(timer.silence(), None);
    }
}
