use proptest::prelude::*;

use super::*;
use crate::shm::memory::PAGE;

#[test]
#[cfg(target_os = "linux")]
fn buffers_are_zeroes_and_give_their_memory_back() {
    for arena in [Arena::private(1 << 24), Arena::in_file(1 << 24)] {
        let arena = Arc::new(arena.unwrap());
        let mut first = Region::new(&arena, 3 << 20).unwrap();
        assert!(first.bytes().iter().all(|x| *x == 0));
        first.bytes_mut().fill(7);
        let second = Region::new(&arena, 100).unwrap();
        assert_eq!((second.bytes().len(), second.bytes()[99]), (PAGE, 0));
        let place = arena.buffer(first.offset() as u64, 3 << 20).unwrap();
        assert_eq!(place.start().cast_const(), first.bytes().as_ptr());
        assert!(Region::new(&arena, 1 << 24).is_none(), "no room");
        let offset = first.offset();
        drop(first);
        let again = Region::new(&arena, 3 << 20).unwrap();
        assert_eq!(again.offset(), offset);
        assert!(again.bytes().iter().all(|x| *x == 0));
        again.abandon();
        let other = Region::new(&arena, 3 << 20).unwrap();
        assert_ne!(other.offset(), offset, "somebody may still write to it");
    }
}

#[test]
fn only_buffers_are_found_in_an_arena() {
    let arena = Arena::of_thread(Room::World(1)).unwrap();
    assert!(arena.buffer(0, 10).is_none());
    assert!(arena.buffer(u64::MAX - 1, 10).is_none());
    assert!(arena.buffer(CONTROL as u64, usize::MAX).is_none());
    assert!(arena.buffer(CONTROL as u64 + 8, 8).is_none());
}

#[test]
#[cfg(target_os = "linux")]
fn another_mapping_sees_the_same() {
    let own = Arc::new(Arena::in_file(1 << 20).unwrap());
    let other = Arena::in_file_of_peer(own.file().unwrap()).unwrap();
    own.counter().publish(3);
    assert!(other.counter().reached(3));
    let mut region = Region::new(&own, 1000).unwrap();
    region.bytes_mut()[..3].copy_from_slice(&[1, 2, 3]);
    let place = other.buffer(region.offset() as u64, 3).unwrap();
    // SAFETY: the bytes are not written while they are read.
    assert_eq!(unsafe { place.bytes() }, [1, 2, 3]);
    assert!(Region::new(&Arc::new(other), 10).is_none(), "not its own");
    let file = tempfile::tempfile().unwrap();
    assert!(Arena::in_file_of_peer(&file).is_err());
}

/// Runs itself in a process of its own, whose limits it changes.
#[test]
#[cfg(target_os = "linux")]
fn a_limit_of_files_is_kept() {
    use rustix::process::{Resource, getrlimit, setrlimit};

    const ALONE: &str = "ACCEL_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "shm::arena::tests::a_limit_of_files_is_kept"])
            .env(ALONE, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{}: {text}",
            output.status
        );
        return;
    }
    let limit = |bytes: usize| {
        let mut limit = getrlimit(Resource::Fsize);
        limit.current = Some(bytes as u64);
        setrlimit(Resource::Fsize, limit).unwrap();
    };
    for (bytes, pages) in [(CONTROL + 3 * PAGE + 7, 3), (CONTROL, 0)] {
        limit(bytes);
        let arena = Arc::new(Arena::of_process([1, 2], Room::World(1)).unwrap());
        assert_eq!(arena.memory.len(), CONTROL + pages * PAGE);
        assert_eq!(Region::new(&arena, 3 * PAGE).is_some(), pages == 3);
        assert!(Region::new(&arena, 4 * PAGE).is_none());
    }
    limit(CONTROL - 1);
    let text = Arena::of_process([1, 2], Room::World(1))
        .unwrap_err()
        .to_string();
    assert!(text.contains("`ulimit -f`"), "{text}");
}

#[test]
fn what_was_given_back_becomes_one_again() {
    let mut free_list = FreeList::new(10..1000);
    let first = free_list.take(100, 64).unwrap();
    assert_eq!(first, 64..164);
    let second = free_list.take(100, 64).unwrap();
    let third = free_list.take(600, 64).unwrap();
    assert_eq!(free_list.take(100, 64), None);
    free_list.free(second.clone());
    assert_eq!(free_list.take(100, 64), Some(second.clone()));
    for range in [first, third, second] {
        free_list.free(range);
    }
    assert_eq!((free_list.0.len(), free_list.0[0].clone()), (1, 10..1000));
    assert_eq!(free_list.take(usize::MAX, 4096), None);
}

proptest! {
    #[test]
    fn no_byte_is_given_twice(steps in proptest::collection::vec((any::<bool>(), 1..40_usize, 0..5_u32), 0..60)) {
        let mut free_list = FreeList::new(0..256);
        let mut taken: Vec<Range<usize>> = Vec::new();
        for (take, len, align) in steps {
            if take {
                if let Some(range) = free_list.take(len, 1 << align) {
                    prop_assert_eq!((range.len(), range.start % (1 << align)), (len, 0));
                    prop_assert!(taken.iter().all(|x| x.end <= range.start || range.end <= x.start));
                    taken.push(range);
                }
            } else if !taken.is_empty() {
                free_list.free(taken.swap_remove(len % taken.len()));
            }
            let used: usize = taken.iter().map(ExactSizeIterator::len).sum();
            let free: usize = free_list.0.iter().map(ExactSizeIterator::len).sum();
            prop_assert_eq!(used + free, 256);
        }
    }
}
