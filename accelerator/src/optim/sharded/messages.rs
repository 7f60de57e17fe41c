use std::collections::HashMap;

use burn::module::ParamId;
use burn::tensor::Bytes;

use super::home::Home;

/// A parameter of so many bytes that is cut travels by itself, from where its piece lies.
const ALONE: usize = 1 << 16;

/// In which messages pieces travel: those of large parameters by themselves, all others together. The
/// same on every rank.
#[derive(Debug, Default)]
pub(super) struct Messages {
    messages: Vec<Message>,
    places: HashMap<ParamId, Place>,
    /// The number of the message with what is small.
    together: Option<usize>,
}

#[derive(Debug)]
pub(super) struct Message {
    /// In the order in which they lie there.
    parameters: Vec<ParamId>,
    /// In bytes, by rank.
    lengths: Vec<usize>,
}

/// Where the pieces of a parameter lie.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) message: usize,
    /// For each rank, where its piece begins in what it sends, and how long it is.
    pub(super) spots: Vec<(usize, usize)>,
}

impl Messages {
    /// Adds a parameter, each of whose elements has so many bytes.
    pub(super) fn add(&mut self, id: ParamId, home: &Home, width: usize) {
        let is_alone = home.is_cut() && home.elements() * width >= ALONE;
        let number = match self.together.filter(|_| !is_alone) {
            Some(number) => number,
            None => {
                self.messages.push(Message {
                    parameters: Vec::new(),
                    lengths: vec![0; home.ranks()],
                });
                let number = self.messages.len() - 1;
                if !is_alone {
                    self.together = Some(number);
                }
                number
            }
        };
        let message = &mut self.messages[number];
        message.parameters.push(id);
        let spot = |(rank, end): (usize, &mut usize)| {
            let (start, length) = (*end, home.range(rank).len() * width);
            *end += length;
            (start, length)
        };
        let spots = message.lengths.iter_mut().enumerate().map(spot).collect();
        let place = Place {
            message: number,
            spots,
        };
        self.places.insert(id, place);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Message> {
        self.messages.iter()
    }

    pub(super) fn take_place(&mut self, id: ParamId) -> Option<Place> {
        self.places.remove(&id)
    }
}

impl Message {
    /// In bytes, by rank.
    pub(super) fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// What a rank sends, of its pieces.
    pub(super) fn collect(&self, pieces: &mut HashMap<ParamId, Bytes>) -> Bytes {
        let mut own = self.parameters.iter().filter_map(|id| pieces.remove(id));
        let Some(first) = own.next() else {
            return Bytes::from_bytes_vec(Vec::new());
        };
        let Some(second) = own.next() else {
            return first;
        };
        let mut all = first.to_vec();
        for piece in core::iter::once(second).chain(own) {
            all.extend_from_slice(&piece);
        }
        Bytes::from_bytes_vec(all)
    }
}
