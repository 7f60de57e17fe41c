//! A rank's open connection to the store.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    net::{Shutdown, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::{
    StoreHost, StoreServer,
    state::{Word, beat_every},
};
use crate::{
    error::{Certainty, Culprit, Error, Kind, Result, Seconds},
    wire::message::{self, Message, Refusal, Registration, TEXT, shorten},
};

/// A live connection to the store, for as long as the group lives: what the store has seen comes
/// in, what this rank has suffered goes out. Handles are cheap to clone; the connection ends with
/// the last one, and with it the store, where this rank hosts it.
///
/// Nothing here waits for the store, except [`testimony`](Self::testimony) for as long as it is
/// asked to. Once the ranks are connected, the end of the line means nothing to them.
#[derive(Clone)]
pub(crate) struct StoreLine(Arc<Handle>);

impl StoreLine {
    /// Keeps the connection on which the table has come.
    pub(super) fn open(
        rank: usize,
        stream: TcpStream,
        liveness: Duration,
        store: Store,
        server: Option<StoreServer>,
    ) -> Result<Self> {
        let wire = Arc::new(Wire {
            stream,
            liveness,
            store,
            writer: Mutex::new(Writer::Whole),
            known: Mutex::default(),
            changed: Condvar::new(),
            wake: Mutex::new(None),
        });
        let listening = Arc::clone(&wire);
        thread::Builder::new()
            .name("store-line".to_owned())
            .stack_size(512 * 1024)
            .spawn(move || listening.listen())
            .map_err(|error| Error::io("the line to the store cannot be kept", error))?;
        Ok(Self(Arc::new(Handle { rank, wire, server })))
    }

    /// What the store knows about the end of a rank, waiting a moment for it. The text goes on
    /// from "rank 2 is lost: ".
    pub(crate) fn testimony(&self, rank: usize, patience: Duration) -> Option<String> {
        let wire = &self.0.wire;
        // Rank 0 sees connections end as every rank does; a launcher sees how processes end.
        let patience = match wire.store.host {
            StoreHost::Launcher => patience,
            StoreHost::Rank0 => Duration::ZERO,
        };
        let waiting =
            |known: &mut Known| known.end == End::Open && !known.testimonies.contains_key(&rank);
        let waited = wire
            .changed
            .wait_timeout_while(wire.known(), patience, waiting);
        let (known, _) = waited.unwrap_or_else(PoisonError::into_inner);
        known.testimonies.get(&rank).cloned()
    }

    /// Tells the store how this rank's group failed: whom it blames (or itself), and in which
    /// words.
    pub(crate) fn accuse(&self, error: &Error) {
        // Until the ranks are connected the store knows what it has said itself.
        let told = {
            let known = self.0.wire.known();
            !known.connected && known.verdict.is_some()
        };
        if !told {
            self.say(
                Word::Accuse(error.clone()),
                &Message::Accuse(Refusal::bounded(error)),
            );
        }
    }

    /// A testimony that has arrived, each given once: the rank and the text.
    pub(crate) fn news(&self) -> Option<(usize, String)> {
        self.0.wire.known().news.pop_front()
    }

    /// Calls `wake` on the line's thread whenever there may be [`news`](Self::news), and once at
    /// once. It takes the place of the one before.
    pub(crate) fn on_news(&self, wake: impl Fn() + Send + Sync + 'static) {
        let wake: Wake = Arc::new(wake);
        *self.0.wire.wake_slot() = Some(Arc::clone(&wake));
        wake();
    }

    /// Tells the store that this rank leaves in good order.
    pub(crate) fn farewell(&self) {
        self.say(Word::Farewell, &Message::Farewell);
    }

    /// Tells the store that this rank is connected to all others. From here on the store judges
    /// nobody, and its end means nothing.
    pub(crate) fn connected(&self) {
        self.0.wire.known().connected = true;
        self.say(Word::Connected, &Message::Connected);
    }

    /// Why the ranks cannot become connected, as far as the store knows.
    pub(crate) fn verdict(&self) -> Option<Error> {
        self.0.wire.known().verdict.clone()
    }

    /// Cuts the connection, as a broken network would.
    pub(crate) fn cut(&self) {
        // It may be cut already.
        let _ = self.0.wire.stream.shutdown(Shutdown::Both);
    }

    fn say(&self, word: Word, message: &Message) {
        match &self.0.server {
            // What this rank says last must be known before its store ends.
            Some(server) => server.said(self.0.rank, word),
            None => self.0.wire.send(message),
        }
    }
}

impl fmt::Debug for StoreLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreLine")
            .field("rank", &self.0.rank)
            .field("store", &self.0.wire.store)
            .finish_non_exhaustive()
    }
}

/// Where a store is, and who hosts it.
#[derive(Debug)]
pub(super) struct Store {
    /// `host:port`.
    pub(super) address: String,
    pub(super) host: StoreHost,
    /// The host and the id of the process, once they are known.
    pub(super) keeper: Option<(String, u32)>,
}

impl Store {
    /// The error of a rank that can do without a store no longer.
    pub(super) fn error(&self, what: impl fmt::Display) -> Error {
        let text = format!("{self} {what}");
        match (self.host, &self.keeper) {
            (StoreHost::Launcher, _) => Error::new(Kind::Rendezvous, text),
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

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = match self.host {
            StoreHost::Launcher => "the launcher",
            StoreHost::Rank0 => "rank 0",
        };
        write!(f, "the store at {}, hosted by {host}", self.address)?;
        match &self.keeper {
            Some((host, pid)) => write!(f, " (process {pid} on {host}),"),
            None => f.write_str(","),
        }
    }
}

/// Who a registered rank is, and why it is to blame.
pub(super) fn culprit(rank: &Registration, cause: impl Into<String>) -> Culprit {
    Culprit {
        rank: rank.rank,
        host: rank.host.clone(),
        pid: Some(rank.pid),
        cause: cause.into(),
        certainty: Certainty::Settled,
    }
}

/// Signs of life in both directions: when the next one is due, and for how long the other side
/// has given none. Time in which this side itself was stopped does not count.
#[derive(Debug)]
pub(super) struct Pulse {
    liveness: Duration,
    heard: Instant,
    beat: Instant,
    /// When this side was to look again.
    expected: Instant,
}

impl Pulse {
    pub(super) fn new(liveness: Duration) -> Self {
        let now = Instant::now();
        Self {
            liveness,
            heard: now,
            beat: now,
            expected: now,
        }
    }

    /// How long to wait at most.
    pub(super) fn pause(&mut self) -> Duration {
        let now = Instant::now();
        self.expected = self.next();
        self.expected.saturating_duration_since(now)
    }

    /// The other side has given a sign of life.
    pub(super) fn heard(&mut self) {
        self.heard = Instant::now();
    }

    /// Whether it is time for a sign of life, which is then taken to be given.
    pub(super) fn is_due(&mut self) -> bool {
        let now = Instant::now();
        if now > self.expected + self.liveness / 4 {
            self.heard = now;
        }
        let due = now >= self.next();
        if due {
            self.beat = now;
        }
        due
    }

    /// For how long nothing has come, where that is too long.
    pub(super) fn silence(&self) -> Option<Duration> {
        let silence = self.heard.elapsed();
        (silence > self.liveness).then_some(silence)
    }

    fn next(&self) -> Instant {
        self.beat + beat_every(self.liveness)
    }
}

/// What all clones of a line share; dropped, it ends the connection.
struct Handle {
    rank: usize,
    wire: Arc<Wire>,
    /// The store, where this rank hosts it.
    server: Option<StoreServer>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // The thread of the line sees it, and ends.
        let _ = self.wire.stream.shutdown(Shutdown::Both);
    }
}

struct Wire {
    stream: TcpStream,
    liveness: Duration,
    store: Store,
    writer: Mutex<Writer>,
    known: Mutex<Known>,
    changed: Condvar,
    wake: Mutex<Option<Wake>>,
}

type Wake = Arc<dyn Fn() + Send + Sync>;

/// Whether the last message went out whole, without which nothing can follow.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Writer {
    Torn,
    Whole,
}

#[derive(Debug, Default)]
struct Known {
    testimonies: BTreeMap<usize, String>,
    news: VecDeque<(usize, String)>,
    verdict: Option<Error>,
    connected: bool,
    end: End,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum End {
    /// The store has closed in good order.
    Adjourned,
    /// The line broke.
    Broken,
    #[default]
    Open,
}

impl Wire {
    fn listen(&self) {
        let mut pulse = Pulse::new(self.liveness);
        loop {
            let connected = self.known().connected;
            let pause = (!connected).then(|| pulse.pause());
            match Message::arrives(&self.stream, pause) {
                Ok(true) => {
                    let due = Instant::now() + SLACK;
                    match Message::receive(&self.stream, message::LONG, due) {
                        Ok(message) => self.take(message),
                        Err(_) => break,
                    }
                    pulse.heard();
                }
                Ok(false) => {}
                Err(_) => break,
            }
            if connected {
                continue;
            }
            if pulse.is_due() {
                self.send(&Message::Heartbeat);
            }
            if self.store.host == StoreHost::Rank0
                && let Some(silence) = pulse.silence()
            {
                self.judge(format_args!("has been silent for {}", Seconds(silence)));
            }
        }
        {
            let mut known = self.known();
            if known.end == End::Open {
                known.end = End::Broken;
            }
        }
        self.judge(format_args!("is gone"));
    }

    fn take(&self, message: Message) {
        {
            let mut known = self.known();
            match message {
                Message::Testimony { rank, text } => known.testify(rank, text),
                Message::Hearsay { rank, text } => {
                    known.testimonies.entry(rank).or_insert(text);
                }
                Message::Refused(refusal) => {
                    let error = refusal.into_error();
                    // The store may not have heard yet that this rank is connected.
                    if known.connected && error.is_peer_lost() {
                        for &rank in error.ranks() {
                            if !known.testimonies.contains_key(&rank) {
                                known.testify(rank, shorten(&error.to_string(), TEXT));
                            }
                        }
                    }
                    known.verdict.get_or_insert(error);
                }
                Message::Adjourned => known.end = End::Adjourned,
                _ => return,
            }
        }
        self.wake();
    }

    /// The store does not do its part; that matters until the ranks are connected.
    fn judge(&self, what: fmt::Arguments<'_>) {
        {
            let mut known = self.known();
            if !known.connected && known.end != End::Adjourned {
                let what = format_args!("{what} before the ranks were connected");
                known.verdict.get_or_insert(self.store.error(what));
            }
        }
        self.wake();
    }

    fn send(&self, message: &Message) {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if *writer == Writer::Whole && message.offer(&self.stream).is_err() {
            // A store that takes nothing is stopped or gone; this rank goes on without it.
            *writer = Writer::Torn;
        }
    }

    fn wake(&self) {
        self.changed.notify_all();
        let wake = self.wake_slot().clone();
        if let Some(wake) = wake {
            wake();
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Each change can stand alone: what is known of one rank, or of the store.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_slot(&self) -> MutexGuard<'_, Option<Wake>> {
        self.wake.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn testify(&mut self, rank: usize, text: String) {
        self.testimonies.insert(rank, text.clone());
        self.news.push_back((rank, text));
    }
}

/// How long the rest of a message may take.
const SLACK: Duration = Duration::from_secs(10);
