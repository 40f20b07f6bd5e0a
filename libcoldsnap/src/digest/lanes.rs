//! Streams from a queue, hashed two at a time on one core.

use std::io::{self, BufRead};

use super::{Digest, Sha256};

/// Something that sums streams, two of them in step.
pub(crate) trait TwoWay: Default {
    /// What it makes of a stream.
    type Sum;
    /// Adds bytes.
    fn update(&mut self, bytes: &[u8]);
    /// Adds bytes to each of two streams.
    fn update_two(a: (&mut Self, &[u8]), b: (&mut Self, &[u8]));
    /// The sum of everything added.
    fn finish(self) -> Self::Sum;
}

impl TwoWay for Sha256 {
    type Sum = Digest;

    fn update(&mut self, bytes: &[u8]) {
        Self::update(self, bytes);
    }

    fn update_two(a: (&mut Self, &[u8]), b: (&mut Self, &[u8])) {
        Self::update_two(a, b);
    }

    fn finish(self) -> Digest {
        Self::finish(self)
    }
}

/// A stream that is being summed.
struct Lane<J, R, H> {
    job: J,
    stream: R,
    hasher: H,
}

/// Sums every stream that `next` hands out, two in step where there are two. `done` is called with each job and
/// its sum, or with the error that ended its stream; `progress` with the number of bytes summed since the last
/// call.
pub(crate) fn sum_all<J, R: BufRead, H: TwoWay>(
    mut next: impl FnMut() -> Option<(J, R)>,
    mut done: impl FnMut(J, io::Result<H::Sum>),
    mut progress: impl FnMut(u64),
) {
    let mut next = || next().map(|(job, stream)| Lane { job, stream, hasher: H::default() });
    let (mut a, mut b) = (None, None);
    loop {
        a = refill(a.take(), &mut next, &mut done);
        b = refill(b.take(), &mut next, &mut done);
        let bytes = match (&mut a, &mut b) {
            (None, None) => return,
            (Some(one), None) | (None, Some(one)) => one.step(),
            (Some(a), Some(b)) => Lane::step_two(a, b),
        };
        progress(bytes);
    }
}

/// The same lane if it has more bytes, else the next one that has; what ended is done.
fn refill<J, R: BufRead, H: TwoWay>(
    mut lane: Option<Lane<J, R, H>>,
    next: &mut impl FnMut() -> Option<Lane<J, R, H>>,
    done: &mut impl FnMut(J, io::Result<H::Sum>),
) -> Option<Lane<J, R, H>> {
    loop {
        let Lane { job, mut stream, hasher } = match lane.take() {
            Some(lane) => lane,
            None => next()?,
        };
        match fill(&mut stream) {
            Ok(true) => return Some(Lane { job, stream, hasher }),
            Ok(false) => done(job, Ok(hasher.finish())),
            Err(error) => done(job, Err(error)),
        }
    }
}

/// Reads if nothing is waiting, and says whether the stream has more.
fn fill(stream: &mut impl BufRead) -> io::Result<bool> {
    loop {
        match stream.fill_buf() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(|bytes| !bytes.is_empty()),
        }
    }
}

/// What a stream has ready since the last [`fill`].
fn ready(stream: &mut impl BufRead) -> &[u8] {
    // A filled reader hands out what it has; an error is found by the next fill.
    stream.fill_buf().unwrap_or_default()
}

impl<J, R: BufRead, H: TwoWay> Lane<J, R, H> {
    fn step(&mut self) -> u64 {
        let bytes = ready(&mut self.stream);
        self.hasher.update(bytes);
        let taken = bytes.len();
        self.stream.consume(taken);
        taken as u64
    }

    fn step_two(a: &mut Self, b: &mut Self) -> u64 {
        let (a_bytes, b_bytes) = (ready(&mut a.stream), ready(&mut b.stream));
        let taken = a_bytes.len().min(b_bytes.len());
        H::update_two((&mut a.hasher, &a_bytes[..taken]), (&mut b.hasher, &b_bytes[..taken]));
        a.stream.consume(taken);
        b.stream.consume(taken);
        2 * taken as u64
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufReader, Read};

    use super::*;

    /// Yields bytes in short reads and fails at its end.
    struct Breaking<'a>(&'a [u8]);

    impl Read for Breaking<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            if self.0.is_empty() {
                return Err(io::Error::other("broken"));
            }
            let len = buffer.len().min(7);
            self.0.read(&mut buffer[..len])
        }
    }

    #[test]
    fn every_stream_is_summed_once_whatever_its_length() {
        let data: Vec<u8> = (0..5000).map(|n| u8::try_from(n % 253).unwrap()).collect();
        let lengths = [0, 1, 63, 64, 65, 4999, 0, 1000, 5000, 3, 64];
        for capacity in [1, 64, 100, 8192] {
            let mut queue = lengths.iter().enumerate();
            let (mut sums, mut bytes) = (vec![None; lengths.len()], 0);
            sum_all::<_, _, Sha256>(
                || queue.next().map(|(n, &len)| (n, BufReader::with_capacity(capacity, &data[..len]))),
                |n, sum| assert!(sums[n].replace(sum.unwrap()).is_none()),
                |n| bytes += n,
            );
            assert_eq!(bytes, lengths.iter().sum::<usize>() as u64);
            for (sum, len) in sums.iter().zip(lengths) {
                assert_eq!(*sum, Some(Digest::of(&data[..len])), "{len} bytes, {capacity} at a time");
            }
        }
    }

    #[test]
    fn a_stream_that_breaks_does_not_disturb_the_other() {
        let data = [5; 1000];
        let mut queue = [true, false, true, false].into_iter();
        let (mut broken, mut right) = (0, 0);
        sum_all::<_, Box<dyn BufRead>, Sha256>(
            || {
                let breaks = queue.next()?;
                let stream: Box<dyn BufRead> =
                    if breaks { Box::new(BufReader::new(Breaking(&data))) } else { Box::new(&data[..]) };
                Some((breaks, stream))
            },
            |breaks, sum| match sum {
                Ok(digest) => {
                    assert!(!breaks && digest == Digest::of(&data));
                    right += 1;
                }
                Err(error) => {
                    assert!(breaks && error.to_string() == "broken");
                    broken += 1;
                }
            },
            |_| (),
        );
        assert_eq!((broken, right), (2, 2));
    }
}
