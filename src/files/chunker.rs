//! Content-defined chunking: an insertion changes only the chunks around it.

use std::io::{self, Read};

use rustic_cdc::{Polynom, Rabin64, RollingHash64};

use crate::error::FilesError;
use crate::random::fill_random;

/// A polynomial over GF(2), with one bit per coefficient.
pub(crate) type Polynomial = u64;

/// Degree of a repository's polynomial, as in `restic`.
const DEGREE: u32 = 53;
const WINDOW_BYTES: usize = 64;
const MIN_CHUNK_BYTES: usize = 512 << 10;
/// Also bounds the memory used per chunk.
pub(crate) const MAX_CHUNK_BYTES: usize = 8 << 20;
/// Chunks end where these bits of the rolling hash are zero: on average, 1 MiB past the minimum.
const SPLIT_MASK: u64 = (1 << 20) - 1;
const BUFFER_BYTES: usize = 256 << 10;

/// Generates a random irreducible polynomial. Each repository uses its own, so that chunk sizes don't reveal which
/// known files it contains.
///
/// # Errors
/// If the system's random number generator fails.
pub(crate) fn generate_polynomial() -> Result<Polynomial, FilesError> {
    loop {
        let mut bytes = [0; 8];
        fill_random(&mut bytes)?;
        // Set the highest coefficient for the degree, and the lowest because x would be a factor otherwise.
        let candidate = u64::from_le_bytes(bytes) & ((1 << DEGREE) - 1) | 1 << DEGREE | 1;
        // About 1 in 27 candidates is irreducible.
        if is_irreducible(candidate) {
            return Ok(candidate);
        }
    }
}

/// Ben-Or's irreducibility test: the polynomial must be coprime to x^(2^i) - x for all i up to half its degree.
fn is_irreducible(polynomial: Polynomial) -> bool {
    const X: Polynomial = 2;
    let mut power = X;
    (0..polynomial.degree() / 2).all(|_| {
        power = multiply_modulo(power, power, polynomial);
        greatest_common_divisor(polynomial, power ^ X) == 1
    })
}

fn multiply_modulo(a: Polynomial, b: Polynomial, modulus: Polynomial) -> Polynomial {
    let top = 1 << (modulus.degree() - 1);
    let mut product = 0;
    for bit in (0..modulus.degree()).rev() {
        let carry = if product & top == 0 { 0 } else { modulus };
        product = product << 1 ^ carry;
        if b >> bit & 1 == 1 {
            product ^= a;
        }
    }
    product
}

fn greatest_common_divisor(mut a: Polynomial, mut b: Polynomial) -> Polynomial {
    while b != 0 {
        (a, b) = (b, a.modulo(&b));
    }
    a
}

/// Hexadecimal serialization of the polynomial in a repository's configuration.
pub(crate) mod hex_polynomial {
    use serde::{Deserialize, Deserializer, Serializer, de};

    use super::{DEGREE, Polynomial};

    pub(crate) fn serialize<S: Serializer>(value: &Polynomial, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{value:x}"))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Polynomial, D::Error> {
        let text = String::deserialize(deserializer)?;
        let value = Polynomial::from_str_radix(&text, 16).map_err(de::Error::custom)?;
        if value >> DEGREE == 1 {
            Ok(value)
        } else {
            Err(de::Error::custom(format!("expected a polynomial of degree {DEGREE}")))
        }
    }
}

/// Splits files into chunks, one file at a time.
pub(crate) struct Chunker {
    rabin: Rabin64,
    buffer: Vec<u8>,
    /// Range of `buffer` that belongs to the next chunk.
    unread: std::ops::Range<usize>,
}

impl Chunker {
    pub(crate) fn new(polynomial: Polynomial) -> Self {
        let rabin = Rabin64::new_with_polynom(WINDOW_BYTES.trailing_zeros(), &polynomial);
        Self { rabin, buffer: Vec::new(), unread: 0..0 }
    }

    /// Prepares for the next file.
    pub(crate) fn reset(&mut self) {
        self.unread = 0..0;
    }

    /// Returns the next chunk, or `None` at the end of the file.
    ///
    /// # Errors
    /// If the reader fails.
    pub(crate) fn next_chunk(&mut self, reader: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
        let mut chunk = self.buffer[self.unread.clone()].to_vec();
        self.unread = 0..0;
        let missing = MIN_CHUNK_BYTES.saturating_sub(chunk.len());
        let read = reader.by_ref().take(missing as u64).read_to_end(&mut chunk)?;
        if read < missing {
            return Ok(Some(chunk).filter(|chunk| !chunk.is_empty()));
        }
        // The buffer is smaller than the minimum chunk size, so the chunk is now exactly the minimum size.
        let window = &chunk[chunk.len() - WINDOW_BYTES..];
        self.rabin.reset();
        for byte in window {
            self.rabin.slide(*byte);
        }
        self.buffer.resize(BUFFER_BYTES, 0);
        while self.rabin.hash & SPLIT_MASK != 0 && chunk.len() < MAX_CHUNK_BYTES {
            let length = read_uninterrupted(reader, &mut self.buffer)?;
            if length == 0 {
                break;
            }
            let end = self.find_boundary(length, MAX_CHUNK_BYTES - chunk.len());
            chunk.extend_from_slice(&self.buffer[..end]);
            self.unread = end..length;
        }
        Ok(Some(chunk))
    }

    /// Returns how many buffered bytes belong to the current chunk.
    fn find_boundary(&mut self, length: usize, limit: usize) -> usize {
        let length = length.min(limit);
        for (index, byte) in self.buffer[..length].iter().enumerate() {
            self.rabin.slide(*byte);
            if self.rabin.hash & SPLIT_MASK == 0 {
                return index + 1;
            }
        }
        length
    }
}

fn read_uninterrupted(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match reader.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Example of an irreducible polynomial from `restic`.
    const POLYNOMIAL: Polynomial = 0x003D_A335_8B4D_C173;

    fn pseudo_random(length: usize, seed: u64) -> Vec<u8> {
        let mut state = seed | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        };
        (0..length).map(|_| next()).collect()
    }

    /// A reader that returns at most this many bytes per read.
    struct SlowReader<'a>(&'a [u8], usize);

    impl Read for SlowReader<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let length = buffer.len().min(self.1);
            self.0.read(&mut buffer[..length])
        }
    }

    fn split(content: &[u8], step: usize) -> Vec<Vec<u8>> {
        let (mut chunker, mut reader) = (Chunker::new(POLYNOMIAL), SlowReader(content, step));
        std::iter::from_fn(|| chunker.next_chunk(&mut reader).unwrap()).collect()
    }

    #[test]
    fn is_irreducible_finds_factors() {
        assert!(is_irreducible(POLYNOMIAL));
        for irreducible in [0b111, 0b1011, 0b10011, 0b1_0001_1011] {
            assert!(is_irreducible(irreducible), "{irreducible:b}");
        }
        // The last is (x^8 + x^4 + x^3 + x + 1)(x^2 + x + 1).
        for reducible in [0b101, 0b1001, 0b1111, 0b111_0100_0001] {
            assert!(!is_irreducible(reducible), "{reducible:b}");
        }
        let polynomial = generate_polynomial().unwrap();
        assert_eq!((polynomial.degree(), polynomial & 1), (53, 1));
    }

    #[test]
    fn chunks_stay_within_size_limits() {
        let content = pseudo_random(24 << 20, 7);
        let chunks = split(&content, usize::MAX);
        assert_eq!(chunks.concat(), content);
        assert!(chunks.len() > 8, "{} chunks", chunks.len());
        let (last, others) = chunks.split_last().unwrap();
        assert!(last.len() <= MAX_CHUNK_BYTES);
        assert!(others.iter().all(|chunk| (MIN_CHUNK_BYTES..=MAX_CHUNK_BYTES).contains(&chunk.len())));
        assert_eq!(
            split(&vec![1; 20 << 20], usize::MAX)[0].len(),
            MAX_CHUNK_BYTES,
            "no boundary in constant data"
        );
        assert_eq!(split(&[], 1), Vec::<Vec<u8>>::new());
        assert_eq!(split(b"a", 1), [b"a"]);
    }

    #[test]
    fn insertion_changes_few_chunks() {
        let content = pseudo_random(16 << 20, 3);
        let mut changed = content.clone();
        changed.splice(5 << 20..5 << 20, *b"inserted");
        let original: std::collections::HashSet<Vec<u8>> = split(&content, usize::MAX).into_iter().collect();
        let new = split(&changed, usize::MAX).into_iter().filter(|chunk| !original.contains(chunk)).count();
        assert!((1..=3).contains(&new), "{new} new chunks, {} original ones", original.len());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn chunks_do_not_depend_on_read_sizes(length in 0..3_usize << 20, seed: u64, step in 1000..500_000_usize) {
            let content = pseudo_random(length, seed);
            prop_assert_eq!(split(&content, step), split(&content, usize::MAX));
        }
    }
}
