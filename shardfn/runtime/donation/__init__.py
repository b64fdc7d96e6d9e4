"""Donated arguments, whose memory results may use."""

from .donated import Donation, donation_of
from .refusals import check_own, take_own

__all__ = ["Donation", "check_own", "donation_of", "take_own"]
