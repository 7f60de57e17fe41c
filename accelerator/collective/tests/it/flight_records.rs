//! The last operations of ranks, as the store and an observer see them.

use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use accelerator_collective::internal::{
    FlightRecords, OpRecord, RankStatus, Rendezvous, StoreHost, StoreOptions, StoreServer, Token,
    flight_records,
};
use accelerator_collective::{Launch, ProcessGroup, ReduceOp, Topology};

use crate::suite::world::long_timeouts;

/// A store with a token, and the rendezvous there.
fn store(world_size: usize) -> (StoreServer, Rendezvous) {
    let token = Token::generate().unwrap();
    let options = StoreOptions::new(world_size)
        .with_job("night run")
        .with_token(token.clone());
    let store = StoreServer::bind_with(("127.0.0.1", 0), options).unwrap();
    let rendezvous = Rendezvous::new("127.0.0.1", store.local_addr().port())
        .with_store(StoreHost::Launcher)
        .with_job("night run")
        .with_token(token);
    (store, rendezvous)
}

fn connect(rendezvous: &Rendezvous, rank: usize, world_size: usize) -> ProcessGroup {
    let topology = Topology::new(rank, world_size).unwrap();
    let launch = Launch::new(topology, rendezvous.clone());
    ProcessGroup::connect(&launch, &long_timeouts()).unwrap()
}

/// Returns what `ask` gets as soon as `is_it`.
fn until(
    ask: impl Fn() -> Vec<FlightRecords>,
    is_it: impl Fn(&[FlightRecords]) -> bool,
) -> Vec<FlightRecords> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let found = ask();
        if is_it(&found) {
            return found;
        }
        assert!(Instant::now() < deadline, "{found:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn last(rank: &FlightRecords) -> Option<&OpRecord> {
    rank.operations.as_ref()?.last()
}

#[test]
fn an_observer_sees_where_each_rank_waits() {
    let (_store, rendezvous) = store(3);
    let (go, late) = mpsc::channel::<()>();
    let mut late = Some(late);
    let ranks: Vec<_> = (0..3)
        .map(|rank| {
            let rendezvous = rendezvous.clone();
            let late = late.take_if(|_| rank == 2);
            thread::spawn(move || {
                let group = connect(&rendezvous, rank, 3);
                for _ in 0..70 {
                    group.barrier().unwrap();
                }
                let part = group.split(rank / 2, 0).unwrap();
                part.barrier().unwrap();
                if let Some(late) = late {
                    late.recv().unwrap();
                }
                group.all_reduce(&mut [1.0_f32; 3], ReduceOp::Sum).unwrap();
                group.close().unwrap();
            })
        })
        .collect();
    let ask = || flight_records(&rendezvous, Duration::from_secs(30)).unwrap();
    let in_sum = |rank: &FlightRecords| {
        last(rank).is_some_and(|last| last.call == "all_reduce sum f32 x 3" && last.ended.is_none())
    };
    let is_behind = |rank: &FlightRecords| {
        last(rank).is_some_and(|last| last.group > 0 && last.ended.is_some())
    };
    let seen = until(ask, |ranks| {
        ranks.len() == 3
            && ranks.iter().all(|rank| rank.state == RankStatus::Answered)
            && ranks[..2].iter().all(in_sum)
            && is_behind(&ranks[2])
    });
    for (number, rank) in seen.iter().enumerate() {
        assert_eq!((rank.rank, rank.pid), (number, std::process::id()));
        let operations = rank.operations.as_ref().unwrap();
        assert_eq!(operations.len(), 64, "those before are forgotten");
        assert!(operations.is_sorted_by_key(|operation| operation.started));
    }
    let behind = last(&seen[2]).unwrap();
    assert_eq!((&*behind.call, behind.failed), ("barrier", false));
    assert!(last(&seen[0]).unwrap().site.contains("flight_records.rs:"));

    let other = rendezvous.clone().with_token(Token::generate().unwrap());
    let refused = flight_records(&other, Duration::from_secs(30)).unwrap_err();
    assert!(refused.is_unauthorized(), "{refused}");
    let other = rendezvous.clone().with_job("another");
    assert!(flight_records(&other, Duration::from_secs(30)).is_err());
    go.send(()).unwrap();
    for rank in ranks {
        rank.join().unwrap();
    }
}

#[test]
fn a_rank_that_fails_leaves_its_operations() {
    let (store, rendezvous) = store(2);
    let ranks = [0, 1].map(|rank| {
        let rendezvous = rendezvous.clone();
        thread::spawn(move || {
            let group = connect(&rendezvous, rank, 2);
            group.barrier().unwrap();
            match rank {
                0 => group
                    .all_reduce(&mut [1.0_f32; 3], ReduceOp::Sum)
                    .unwrap_err(),
                _ => group
                    .all_reduce(&mut [1.0_f64; 3], ReduceOp::Sum)
                    .unwrap_err(),
            };
        })
    });
    for rank in ranks {
        rank.join().unwrap();
    }
    // The connections have ended, so nobody can be asked.
    let ask = || store.flight_records(Duration::from_millis(10));
    let seen = until(ask, |ranks| {
        let has_gone =
            |rank: &FlightRecords| rank.state == RankStatus::Gone && last(rank).is_some();
        ranks.len() == 2 && ranks.iter().all(has_gone)
    });
    let calls: Vec<_> = seen.iter().map(|rank| &*last(rank).unwrap().call).collect();
    assert_eq!(calls, ["all_reduce sum f32 x 3", "all_reduce sum f64 x 3"]);
    for rank in &seen {
        assert_eq!(rank.state, RankStatus::Gone);
        assert!(last(rank).unwrap().failed && last(rank).unwrap().ended.is_some());
    }
}
