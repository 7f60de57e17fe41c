//! Handshakes of the store: who may join, and who is rejected.

use std::{
    net::{TcpListener, TcpStream},
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use super::ServerState;
use super::rank_stream::RankStream;
use crate::error::{Error, Result};
use crate::rendezvous::outbox::{Outbox, RankConnection};
use crate::rendezvous::peer_origin::{PeerOrigin, plain};
use crate::rendezvous::store_state::{Connection, StoreInput};
use crate::rendezvous::{PendingHandshake, PendingHandshakes, Security, Token, random};
use crate::socket::limit_backoff;
use crate::wire::message::{MAX_SHORT_BYTES, Message, Nonce, Proves, Registration};
use crate::wire::{ReadError, WireError, from_bytes};

impl ServerState {
    pub(super) fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for connection in 0.. {
            let accepted = listener.accept();
            if self.is_stopped() {
                return;
            }
            let Ok((stream, _)) = accepted else {
                // Too many open files, for instance: try again, but not at full speed.
                thread::sleep(Duration::from_millis(20));
                continue;
            };
            limit_backoff(&stream);
            let stream = Arc::new(stream);
            let handshake = self.pending.enter(&stream);
            let shared = Arc::clone(self);
            let spawned = thread::Builder::new()
                .name("store-handshake".to_owned())
                .stack_size(512 * 1024)
                .spawn(move || shared.receive(connection, &stream, handshake));
            if let Err(error) = spawned {
                tracing::warn!(%error, "the store has no thread for a connection");
            }
        }
    }

    /// Performs the handshake of a connection. If a rank joins, hands the connection to the reading thread; otherwise
    /// serves it until it ends.
    fn receive(
        &self,
        connection: Connection,
        stream: &Arc<TcpStream>,
        mut handshake: PendingHandshake,
    ) {
        // Without a token, only some processes may join at all. The others are refused through a list of their own, so
        // that they take no place from those that may.
        let origin = match self.options.token {
            Some(_) => None,
            None => Some(PeerOrigin::of(stream, ORIGIN_LOOKUP_TIME)),
        };
        if self.check_origin(origin).is_err() {
            drop(handshake);
            handshake = self.rejected_handshakes.enter(stream);
        }
        let admitted = self.admit(stream, origin);
        let inside = handshake.leave();
        let (registration, nonces) = match admitted {
            Ok(Admitted::Observer) if inside => return self.answer(stream),
            Ok(Admitted::Rank(registration, nonces)) if inside => (registration, nonces),
            // The connection had to make room for others. If it is a rank, it will connect again.
            Ok(_) => return,
            Err(error) => {
                self.reject(stream, &error);
                return;
            }
        };
        let rank = registration.rank;
        let Ok(outbox) = Outbox::new(Arc::clone(stream)) else {
            // The peer is gone already.
            return;
        };
        {
            let mut registry = self.registry.lock();
            if self.is_stopped() {
                return;
            }
            let outbox = Arc::clone(&outbox);
            registry
                .connections
                .insert(connection, RankConnection { outbox, nonces });
        }
        self.step(StoreInput::Registered {
            connection,
            registration: *registration,
        });
        if self.registry.lock().state.knows(connection) {
            return self
                .reader_queue
                .add(RankStream::new(connection, rank, Arc::clone(stream)));
        }
        // The rank reads why it was refused, and goes.
        let _ = Message::arrives(stream, Some(Duration::from_secs(1)));
        self.registry.lock().connections.remove(&connection);
        outbox.end();
        self.step(StoreInput::Gone { connection });
    }

    /// Answers an observer with the last operations of all ranks.
    fn answer(&self, stream: &TcpStream) {
        // One at a time: each of them makes work for all ranks.
        if self.is_inspected.swap(true, Ordering::AcqRel) {
            let busy =
                Error::rendezvous("another `accel-launch inspect` is reading this job; try again");
            let _ = Message::Refused(WireError::new(&busy)).offer(stream);
            return;
        }
        self.answer_one(stream);
        self.is_inspected.store(false, Ordering::Release);
    }

    fn answer_one(&self, stream: &TcpStream) {
        let ranks = self.records.ask(&self.registry, RECORDS_WAIT);
        let told = ranks.into_iter().map(|rank| Message::RecordsOf {
            rank: rank.rank,
            host: rank.host,
            pid: rank.pid,
            state: rank.state,
            records: rank.operations,
        });
        for message in told.chain([Message::StoreClosing]) {
            // The observer may have gone.
            if message.send(stream).is_err() {
                return;
            }
        }
    }

    fn reject(&self, stream: &TcpStream, error: &Error) {
        let peer = match stream.peer_addr() {
            Ok(peer) => plain(peer).to_string(),
            Err(_) => "somebody".to_owned(),
        };
        tracing::debug!(%peer, %error, "the store turned a connection away");
        // Nobody may be there to read it.
        let _ = Message::Refused(WireError::new(error)).offer(stream);
        if self.rejected_count.fetch_add(1, Ordering::AcqRel) < MAX_REJECTION_NOTES {
            let note = format!("{peer} was turned away: {error}");
            self.step(StoreInput::Rejected { note });
        }
    }

    /// Performs the handshake with a rank that may join, or with an observer.
    fn admit(&self, stream: &TcpStream, origin: Option<PeerOrigin>) -> Result<Admitted> {
        let deadline = Instant::now() + PendingHandshakes::TIMEOUT;
        let unreadable =
            |error: ReadError| Error::protocol(format!("no rank of this job: {error}"));
        // Avoids delays for a rank that waits; if this fails, the handshake only takes longer.
        let _ = stream.set_nodelay(true);
        let key = self.options.token.as_ref().map(Token::key);
        let hello = Message::receive(stream, MAX_SHORT_BYTES, deadline).map_err(unreadable)?;
        let Message::Hello { nonce, job, proves } = hello else {
            return Err(Error::protocol("it did not say hello"));
        };
        self.check_origin(origin)?;
        if job != self.options.job {
            // The rank is not authenticated yet, so the answer contains neither name.
            return Err(Error::rendezvous(
                "this store serves another job than that of the rank; do two jobs use one port?",
            ));
        }
        if key.is_some() && proves == Proves::Nothing {
            return Err(Error::unauthorized(
                "this job has a token, but the rank has none; set ACCEL_TOKEN_FILE to the file \
                 that holds it",
            ));
        }
        let own = random()?;
        Message::Challenge {
            nonce: own,
            proof: key.as_ref().map(|key| key.prove("store", &[&nonce, &own])),
            host: self.host_name.clone(),
            pid: std::process::id(),
        }
        .send(stream)
        .map_err(unreadable)?;
        let register = Message::receive(stream, MAX_SHORT_BYTES, deadline).map_err(unreadable)?;
        let (body, proof) = match register {
            Message::Register { body, proof } => (body, proof),
            Message::Inspect { proof } => {
                return match &key {
                    Some(key)
                        if !key.accepts(
                            "observer",
                            &[&own, &nonce],
                            &proof.unwrap_or_default(),
                        ) =>
                    {
                        Err(Error::unauthorized(
                            "the token of the observer is not the token of this job",
                        ))
                    }
                    _ => Ok(Admitted::Observer),
                };
            }
            _ => return Err(Error::protocol("it did not register")),
        };
        if let Some(key) = &key
            && !key.accepts("rank", &[&own, &nonce, &body], &proof.unwrap_or_default())
        {
            return Err(Error::unauthorized(
                "the token of the rank is not the token of this job; ACCEL_TOKEN_FILE must name \
                 the same token for every process",
            ));
        }
        let registration = from_bytes(&body).map_err(unreadable)?;
        Ok(Admitted::Rank(Box::new(registration), [nonce, own]))
    }

    /// Checks if a process of this origin may join. With a token (`None`), the origin does not matter.
    fn check_origin(&self, origin: Option<PeerOrigin>) -> Result<()> {
        let Some(origin) = origin else {
            return Ok(());
        };
        match origin {
            PeerOrigin::SameUser => Ok(()),
            PeerOrigin::OtherUser { user } => Err(Error::unauthorized(format!(
                "a process of user {user} cannot join another user's job without a token; \
                     set ACCEL_TOKEN_FILE for every process"
            ))),
            PeerOrigin::Unknown if self.options.security == Security::Waived => Ok(()),
            PeerOrigin::Unknown => Err(Error::unauthorized(
                "the system does not say which user runs the process, so it cannot join without a token; \
                 set ACCEL_TOKEN_FILE for every process",
            )),
            PeerOrigin::Remote if self.options.security == Security::Waived => Ok(()),
            PeerOrigin::Remote => Err(Error::unauthorized(
                "a rank on another host cannot join without a token; set ACCEL_TOKEN_FILE for \
                 every process, or ACCEL_INSECURE=1 on a network where everyone may join",
            )),
        }
    }
}

/// A peer that has proved that it belongs to the job.
enum Admitted {
    Observer,
    /// A rank, with the nonces of its challenge.
    Rank(Box<Registration>, [Nonce; 2]),
}

/// The time that ranks may take to answer an observer.
const RECORDS_WAIT: Duration = Duration::from_secs(1);

/// The longest search for the owner of an incoming connection.
const ORIGIN_LOOKUP_TIME: Duration = Duration::from_millis(100);

/// The most rejected connections that are noted; further ones are only answered.
const MAX_REJECTION_NOTES: usize = 64;
