"""Campaigns with few parts, whose outcome is known."""

from ridgeline.planner.campaign.model import Campaign
from ridgeline.planner.failure_catalog import FailureClass

HOUR = 3600.0


def failures(mtbf_s, after="restart", found_by="exit", name="failure"):
    """One class that stops the job once in `mtbf_s`."""
    return FailureClass(name, "job", HOUR / mtbf_s, after, found_by, "made for a test")


def campaign(*classes, **change):
    """500 hours of steps on 4 nodes of 8 devices; every time that is not stated is zero."""
    base = {
        "work_s": 500 * HOUR,
        "nodes": 4,
        "devices_per_node": 8,
        "classes": classes,
        "step_limit_s": 1800.0,
        "save_s": 300.0,
        "write_s": {"shared": 0.0, "local": 0.0},
        "restore_s": {"shared": 600.0, "local": 600.0},
        "price_per_device_hour_usd": 2.0,
    }
    return Campaign(**(base | change))
